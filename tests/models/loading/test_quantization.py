"""Training adapters on quantised weights."""

from typing import Any

import pytest
import torch
from peft import PeftModel

from proofs import by_default
from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models import (
    LoraSettings,
    PolicyModel,
    RewardEnsemble,
    RewardModel,
    apply_lora,
    build_tiny_llama,
    load_causal_lm,
    token_logps,
)

pytest.importorskip("bitsandbytes")
ROWS = [TokenSequence([5, 9, 14, 3, 27], 2), TokenSequence([5, 9, 14, 60], 2)]
(BATCH,) = pack(ROWS)
LORA = LoraSettings(lora_r=4, lora_alpha=4.0, use_rslora=True)
BITS: list[dict[str, Any]] = [{"load_in_4bit": True}, {"load_in_8bit": True}]


@pytest.fixture
def wide_model_folder(tmp_path, byte_tokenizer):
    """A Llama whose layers are as wide as the blocks of 4-bit weights."""
    model = build_tiny_llama(
        len(byte_tokenizer), hidden_size=64, intermediate_size=128, eos_token_id=2, pad_token_id=0
    )
    model.save_pretrained(tmp_path / "wide")
    byte_tokenizer.save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def frozen(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}


def descend(loss, parameters, steps=8):
    """Losses of some Adam steps."""
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    losses = []
    for _ in range(steps):
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("bits", by_default(BITS, BITS[0]))
@pytest.mark.parametrize("checkpointing", by_default([False, True], True))
def test_a_quantised_policy_learns_through_its_adapter_alone(
    bits, checkpointing, wide_model_folder, tmp_path, capfd
):
    policy = PolicyModel.from_pretrained(wide_model_folder, lora=LORA, **bits).train()
    if checkpointing:
        policy.gradient_checkpointing_enable()
    before = frozen(policy)
    reference = policy.ref_logps(BATCH)
    losses = descend(lambda: -policy.logps(BATCH).logps.sum(), policy.parameters())
    assert losses[-1] < losses[0] - 1
    assert before.keys() == frozen(policy).keys() and any(p.dtype != torch.float32 for p in before.values())
    assert all(torch.equal(after, before[name]) for name, after in frozen(policy).items())
    torch.testing.assert_close(policy.ref_logps(BATCH), reference)

    policy.eval().save_pretrained(tmp_path / "out")
    again = PolicyModel.from_pretrained(tmp_path / "out", **bits)
    assert torch.equal(again.logps(BATCH).logps, policy.logps(BATCH).logps)
    unquantised = PolicyModel.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(unquantised.logps(BATCH).logps, policy.logps(BATCH).logps, rtol=0.2, atol=0.2)
    plain = PeftModel.from_pretrained(load_causal_lm(wide_model_folder, **bits), tmp_path / "out")
    torch.testing.assert_close(token_logps(plain, BATCH).logps, policy.logps(BATCH).logps)


@pytest.mark.parametrize("bits", by_default(BITS, BITS[1]))
@pytest.mark.parametrize("head", by_default(["linear", "mlp"], "mlp"))
def test_a_quantised_reward_model_learns_through_adapter_and_head(head, bits, wide_model_folder, tmp_path):
    model = RewardModel.from_language_model(wide_model_folder, head=head, **bits).add_lora(LORA).train()
    before = frozen(model)

    def loss():
        first, second = model(BATCH)[BATCH.sequence_ids.argsort()]
        return -torch.nn.functional.logsigmoid(first - second)

    losses = descend(loss, [p for p in model.parameters() if p.requires_grad])
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(after, before[name]) for name, after in frozen(model).items())
    model.eval().save_pretrained(tmp_path / "rm")
    again = RewardModel.from_pretrained(tmp_path / "rm", **bits)
    rows = [list(row.input_ids) for row in ROWS]
    assert torch.equal(again.score_tokens(rows), model.score_tokens(rows))


@pytest.mark.parametrize("bits", by_default(BITS, BITS[1]))
def test_an_ensemble_of_adapters_shares_a_quantised_trunk(bits, wide_model_folder, tmp_path):
    ensemble = RewardEnsemble.from_language_model(wide_model_folder, size=2, lora=LORA, **bits)
    ensemble.train().gradient_checkpointing_enable()
    before = frozen(ensemble)
    parameters = [p for p in ensemble.parameters() if p.requires_grad]
    losses = descend(lambda: (ensemble(BATCH) - 1).square().sum(), parameters)
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(after, before[name]) for name, after in frozen(ensemble).items())
    ensemble.eval().save_pretrained(tmp_path / "out")
    again = RewardEnsemble.from_pretrained(tmp_path / "out", **bits)
    assert torch.equal(again(BATCH), ensemble(BATCH))
    with raises_error("quantized_model"):
        RewardEnsemble.from_backbone(load_causal_lm(wide_model_folder, **bits), again.tokenizer, size=2)


@pytest.mark.parametrize("bits", by_default(BITS, BITS[0]))
def test_adapters_of_quantised_weights_take_the_gradient_of_the_unquantised_ones(bits, wide_model_folder):
    # B = 0, so that only B gets a gradient: A x times what comes from above, which quantisation moves little.
    gradients = []
    for options in ({}, bits):
        model = apply_lora(load_causal_lm(wide_model_folder, **options), LORA)
        token_logps(model, BATCH).logps.sum().backward()
        found = [p.grad for n, p in model.named_parameters() if "lora_B" in n and p.grad is not None]
        gradients.append(torch.cat([g.flatten() for g in found]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.97
