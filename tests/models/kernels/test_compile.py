"""Compiled layers."""

from typing import Any

import pytest
import torch

from proofs import in_ci
from rlhf_data import TokenSequence, pack
from rlhf_models import LoraSettings, RewardModel, apply_lora, compile_model, tiny_model, token_logps
from rlhf_models.kernels.compile import decoder_layers

# torch's compiler warns of what it does itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

ROWS = [[5, 9, 14, 3, 27, 60, 41], [5, 9, 14, 8], [7, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9]]


def gradients(model, rows) -> Any:
    (batch,) = pack([TokenSequence(row, 1) for row in rows])
    model.zero_grad()
    logps = token_logps(model, batch).logps
    logps.sum().backward()
    return logps.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_compiled(make):
    """Compiled and plain, logps and gradients agree on batches of several sizes, compiled for once."""
    plain, compiled = make(), compile_model(make())
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    torch._dynamo.utils.counters.clear()
    for rows in (ROWS, ROWS[1:], [ROWS[0]], [[3] * 40, *ROWS]):
        expected, found = gradients(plain, rows), gradients(compiled, rows)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        assert found[1].keys() == expected[1].keys()
        for name, gradient in expected[1].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5)
    counters = torch._dynamo.utils.counters
    # A block's norms and its MLP are graphs of their own, which all blocks and batch sizes share.
    assert 1 <= counters["stats"]["unique_graphs"] <= 4 and not counters["graph_break"]


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2"])
def test_what_is_compiled_is_every_blocks_work_beside_attention(architecture):
    model = compile_model(tiny_model(architecture))
    layers = decoder_layers(model)
    assert len(layers) == 2
    for layer in layers:
        compiled = {n for n, child in layer.named_children() if child._compiled_call_impl is not None}
        assert {n for n, _ in layer.named_children()} - compiled == {
            "attn" if architecture == "gpt2" else "self_attn"
        }


@pytest.mark.slow
@pytest.mark.parametrize("architecture", in_ci(["llama", "gpt2", "gemma2"], "llama"))
def test_compiled_and_plain_agree_on_any_batch_size(architecture):
    check_compiled(lambda: tiny_model(architecture, initializer_range=0.1))


@pytest.mark.slow
def test_adapters_are_compiled_along():
    def make():
        model = apply_lora(tiny_model("llama", initializer_range=0.1), LoraSettings(lora_r=2))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.05)
        return model

    check_compiled(make)


@pytest.mark.slow
def test_a_reward_model_is_compiled_and_saved_as_before(byte_tokenizer, tmp_path):
    backbone = tiny_model("llama", vocab_size=len(byte_tokenizer), initializer_range=0.1)
    model = compile_model(RewardModel.from_backbone(backbone, byte_tokenizer))
    expected = RewardModel.from_backbone(backbone, byte_tokenizer).score(["where is"], [" mary ?"])
    torch.testing.assert_close(model.score(["where is"], [" mary ?"]), expected, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "rm")
    again = RewardModel.from_pretrained(tmp_path / "rm")
    torch.testing.assert_close(again.score(["where is"], [" mary ?"]), expected)
