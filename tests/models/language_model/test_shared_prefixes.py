"""Padded batches of a model that shares prefixes: outputs, gradients, and calls that it leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.raises import raises_error
from transformers import AutoModelForSequenceClassification

from rlhf_models import LoraSettings, apply_lora, share_prefixes, tiny_model

IDS = torch.tensor(
    [[5, 6, 7, 8, 9, 2], [5, 6, 7, 4, 2, 0], [1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 2, 0], [3, 0, 0, 0, 0, 0]]
)
"""Rows 0, 1 and 3 begin with 5 6 7, rows 0 and 3 with 5 6 7 8."""
MASK = torch.tensor([[1] * 6, [1] * 5 + [0], [1] * 6, [1] * 5 + [0], [1] + [0] * 5])
STREAM = 6 + 2 + 6 + 1 + 1
"""Tokens of the tree: row 0, "4 2" of row 1, row 2, "2" of row 3, row 4."""


def two(architecture: str) -> tuple[Any, Any, list[int]]:
    """A model that shares prefixes, its plain copy, and the number of tokens of each pass of the first."""
    plain = tiny_model(architecture, initializer_range=0.2).eval()
    shared = share_prefixes(copy.deepcopy(plain))
    if architecture == "gemma2":
        plain.set_attn_implementation("eager")  # which caps logits; transformers' sdpa does not
    return shared, plain, counted(shared)


def counted(model: Any) -> list[int]:
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel()))
    return seen


def assert_same(shared: Any, plain: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> None:
    """Equal logits of all tokens, and equal gradients of their weighted sum."""
    weights = torch.linspace(-1, 1, int(mask.sum()))[:, None]
    for model in (shared, plain):
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask, **options).logits
        (logits[mask.bool()] * weights).sum().backward()
        model.seen = logits[mask.bool()].detach()
    torch.testing.assert_close(shared.seen, plain.seen, rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(shared.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            largest = float(other.grad.abs().max())
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5 * max(largest, 1), msg=name)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma2"])
def test_rows_are_scored_as_padded_ones(architecture):
    shared, plain, tokens = two(architecture)
    assert_same(shared, plain, IDS, MASK, use_cache=False)
    assert tokens == [STREAM]


def test_rows_padded_on_the_left_share_too_where_positions_are_rotary():
    # The tokens of row 1 and 3 are those of before, behind their padding.
    ids = torch.stack([row.roll(int((~kept.bool()).sum())) for row, kept in zip(IDS, MASK, strict=True)])
    mask = MASK.flip(1)
    shared, plain, tokens = two("llama")
    assert_same(shared, plain, ids, mask, use_cache=False)
    assert tokens == [STREAM]
    shared, plain, tokens = two("gpt2")
    assert_same(shared, plain, ids, mask, use_cache=False)
    assert tokens == [ids.numel()]  # there a position has an embedding, which padding shifts


def test_adapters_and_checkpointing_compute_the_same():
    plain = apply_lora(tiny_model("llama", initializer_range=0.2), LoraSettings(lora_r=2))
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    shared = share_prefixes(copy.deepcopy(plain))
    tokens = counted(shared)
    for model in (shared, plain):
        model.train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(shared, plain, IDS, MASK)
    assert tokens[0] == STREAM


def test_a_classifier_scores_rows_as_before():
    config = tiny_model("llama").config
    config.num_labels = 1
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_config(config).eval()
    shared = share_prefixes(copy.deepcopy(plain))
    tokens = counted(shared)
    scores = [model(input_ids=IDS, attention_mask=MASK, use_cache=False).logits for model in (shared, plain)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-6)
    assert tokens == [STREAM]


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": True},
        {"output_hidden_states": True},
        {"attention_mask": torch.ones(5, 1, 6, 6, dtype=torch.bool).tril()},
        {"position_ids": torch.arange(1, 7)[None]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_tree_cannot_answer_is_computed_as_before(options):
    shared, plain, tokens = two("llama")
    call = {"input_ids": IDS, "use_cache": False} | options
    torch.testing.assert_close(shared(**call).logits, plain(**call).logits)
    assert tokens == [IDS.numel()]


def test_holes_in_a_mask_are_computed_as_before():
    shared, plain, tokens = two("llama")
    mask = MASK.clone()
    mask[2, 3] = 0
    call = {"input_ids": IDS, "attention_mask": mask, "use_cache": False}
    torch.testing.assert_close(shared(**call).logits[2], plain(**call).logits[2])
    assert tokens == [IDS.numel()]


def test_positions_as_the_tree_counts_them_are_shared():
    shared, plain, tokens = two("gpt2")
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    assert_same(shared, plain, IDS, MASK, position_ids=positions, use_cache=False)
    assert tokens == [STREAM]


def test_generation_and_copies_go_on():
    shared, plain, _ = two("llama")
    call = {"input_ids": IDS[:1], "max_new_tokens": 4, "do_sample": False}
    assert shared.generate(**call).tolist() == plain.generate(**call).tolist()
    other = copy.deepcopy(share_prefixes(shared))
    tokens = counted(other)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(2)
        plain.get_input_embeddings().weight.mul_(2)
    assert_same(other, plain, IDS, MASK, use_cache=False)  # the copy has weights of its own
    assert tokens == [STREAM]


def test_a_model_without_a_head_is_refused():
    with raises_error("cannot_be_packed", cause="backbone"):
        share_prefixes(tiny_model("llama").base_model)


@pytest.mark.slow
def test_trl_trains_as_with_padded_rows(tmp_path):
    """DPO of TRL: equal losses over steps, and fewer tokens through the model."""
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    from rlhf_models import build_tiny_llama, train_byte_tokenizer

    ends = [(" yes , certainly .", " no ."), (" it is .", " so wrong , never at all .")]
    pairs = [(f"question {n} about a thing : is it so ?", *ends[n % 2]) for n in range(8)]
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    tokenizer: Any = train_byte_tokenizer([text for pair in pairs for text in pair], vocab_size=300)
    start = build_tiny_llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id, seed=1)
    settings: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
    }
    settings |= {
        "output_dir": tmp_path,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
    }

    def losses_and_tokens(wrap: Any) -> tuple[list[float], int]:
        policy, reference = (wrap(copy.deepcopy(start)) for _ in range(2))
        tokens = counted(policy)
        trainer = DPOTrainer(
            policy,
            ref_model=reference,
            args=DPOConfig(**settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], sum(tokens)

    padded, packed = losses_and_tokens(lambda model: model), losses_and_tokens(share_prefixes)
    assert packed[0] == pytest.approx(padded[0], abs=1e-5) and padded[0][-1] < padded[0][0]
    assert packed[1] < 0.7 * padded[1]
