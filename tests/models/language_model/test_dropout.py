"""Dropout on packed streams: drawn in train mode, taken away on request, never in the reference."""

from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, OPTConfig

from rlhf_data import TokenSequence, pack
from rlhf_models import LoraSettings, PolicyModel, disable_dropout, evaluating, tiny_model, token_logps
from rlhf_models.adapters.lora import AdapterSet, add_adapters

HALF = 0.5
SHAPE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NEOX: dict[str, Any] = SHAPE | {"intermediate_size": 48}
OPT: dict[str, Any] = SHAPE | {"ffn_dim": 48}
MODELS: dict[str, Any] = {
    "gpt2, everywhere": lambda: tiny_model("gpt2", resid_pdrop=HALF, embd_pdrop=HALF, attn_pdrop=HALF),
    "gpt2, attention": lambda: tiny_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=HALF),
    "llama, attention": lambda: tiny_model("llama", attention_dropout=HALF),
    "mistral, attention": lambda: tiny_model("mistral", attention_dropout=HALF),
    "gemma2, attention": lambda: tiny_model("gemma2", attention_dropout=HALF),
    "neox, hidden": lambda: config_model(GPTNeoXConfig(vocab_size=300, hidden_dropout=HALF, **NEOX)),
    "opt, hidden": lambda: config_model(
        OPTConfig(vocab_size=300, dropout=HALF, attention_dropout=0.0, word_embed_proj_dim=32, **OPT)
    ),
}


def config_model(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def batch() -> Any:
    prompt = list(range(5, 25))
    return pack([TokenSequence([*prompt, *rest], 20) for rest in ([30, 31, 32], [40, 41, 42, 43])])[0]


def logps(model: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return token_logps(model, batch()).logps


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_drawn_in_train_mode_until_it_is_disabled(name: str) -> None:
    model = MODELS[name]().eval()
    exact = logps(model, 0)
    assert torch.equal(logps(model, 1), exact)
    model.train()
    first, again, other = (logps(model, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, exact)
    first.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    with evaluating(model):
        assert torch.equal(logps(model, 0), exact)
    assert model.training and all(module.training for module in model.modules())
    disable_dropout(model)
    torch.testing.assert_close(logps(model, 0), exact)


def test_kept_attention_weights_are_scaled_up() -> None:
    """Of many draws the mean is what there is without dropout, for the attention of one layer is linear."""
    from rlhf_models.attention.packed import AttentionOptions, TreeAttention

    torch.manual_seed(0)
    plan = TreeAttention(batch())
    tokens = len(batch().input_ids)
    query, key, value = (torch.randn(tokens, heads, 8) for heads in (4, 2, 2))
    for softcap in (None, 5.0):
        exact = plan.attend(0, query, key, value, AttentionOptions(0.3, softcap=softcap))
        options = AttentionOptions(0.3, softcap=softcap, dropout=0.25)
        draws = torch.stack([plan.attend(0, query, key, value, options) for _ in range(400)])
        # Each entry's deviation is below 1; of the mean of 400 draws it is a 20th of that.
        assert (draws.mean(0) - exact).abs().max() < 5 * draws.std(0).max() / 20


def test_the_reference_has_none() -> None:
    model = MODELS["gpt2, everywhere"]()
    adapters = AdapterSet(add_adapters(model, ["policy"], LoraSettings(lora_r=2)))
    policy = PolicyModel(None, _Tokenizer(), adapters=adapters, adapter="policy")
    expected = policy.eval().ref_logps(batch())
    policy.train()
    assert torch.equal(policy.ref_logps(batch()), expected)
    assert not torch.equal(policy.logps(batch()).logps, expected)


class _Tokenizer:
    bos_token_id = eos_token_id = pad_token_id = unk_token_id = 0
    added_tokens_decoder: ClassVar[dict[int, object]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {"<eos>": 0}
