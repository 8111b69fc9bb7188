"""What holds for every method: the cut of a step changes nothing, nor does an interruption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from proofs import by_default
from resumed import assert_resumed_equals_uninterrupted
from rlhf_algos import METHODS
from rlhf_algos.tracking.run_facts import MACHINE_KEYS
from rlhf_data import RunFolder
from rlhf_models import (
    JudgeModel,
    LoraSettings,
    ProcessRewardModel,
    RewardEnsemble,
    RewardModel,
    add_adapters,
    tiny_model,
    train_byte_tokenizer,
)

TOKENIZER = train_byte_tokenizer(["a story"])


def _lm() -> Any:
    return tiny_model("llama", vocab_size=len(TOKENIZER))


def _ensemble(kind: Any) -> Any:
    lora = LoraSettings(lora_r=2) if kind == "adapters" else None
    return RewardEnsemble.from_backbone(_lm(), TOKENIZER, size=2, kind=kind, lora=lora)


def _lora(dropout: float) -> LoraSettings:
    return LoraSettings(lora_r=2, lora_dropout=dropout)


MODELS: dict[str, Callable[[float], Any]] = {
    "lm": lambda dropout: _lm(),
    "lora": lambda dropout: add_adapters(_lm(), ["default"], _lora(dropout)),
    "reward": lambda dropout: RewardModel.from_backbone(_lm(), TOKENIZER),
    "reward-lora": lambda dropout: RewardModel.from_backbone(_lm(), TOKENIZER).add_lora(_lora(dropout)),
    "judge": lambda dropout: JudgeModel.from_backbone(_lm(), TOKENIZER),
    "members": lambda dropout: _ensemble("independent"),
    "adapters": lambda dropout: _ensemble("adapters"),
    "heads": lambda dropout: _ensemble("heads"),
    "prm": lambda dropout: ProcessRewardModel.from_backbone(_lm(), TOKENIZER),
    "prm-lora": lambda dropout: ProcessRewardModel.from_backbone(_lm(), TOKENIZER).add_lora(_lora(dropout)),
}
KINDS = {"sft": "sequences", "preference": "pairs", "steps": "steps", "kto": "labelled"}
PRECOMPUTED = {"precompute_ref_log_probs": True}
SETTINGS: dict[str, Any] = {"reward": {"center_rewards_coefficient": 0.1}, "simpo": {"cpo_alpha": 0.5}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("lm" if method.model == "policy" else method.model, SETTINGS.get(name, {}))
        for name, method in METHODS.items()
        if not method.online
    },
    **{
        f"{name}-lora": ("lora", {})
        for name, method in METHODS.items()
        if method.model == "policy" and not method.online
    },
    "reward-lora": ("reward-lora", {}),
    "reward-members": ("members", {}),
    "reward-adapters": ("adapters", {}),
    "reward-heads": ("heads", {}),
    "prm-lora": ("prm-lora", {"aggregate": "product"}),
    "dpo-precomputed": ("lm", {"loss_type": "ipo", **PRECOMPUTED}),
    "kto-ema": ("lm", {"kl_estimate": "ema"}),
    "kto-precomputed": ("lm", PRECOMPUTED),
}
"""The model and the settings of each method, and of its variants."""
EACH = pytest.mark.parametrize("method", by_default(CASES, "sft", "dpo-lora", "reward-adapters"))


def _trainer(
    method: str, examples: Any, config: dict[str, Any] | None = None, *, dropout: float = 0.0, **options: Any
) -> Any:
    made, (model, own) = METHODS[method.partition("-")[0]], CASES[method]
    kind = KINDS[made.records]
    values = {"learning_rate": 3e-3, "per_device_train_batch_size": 4, "max_steps": 2, "seed": 5}
    settings = made.config_class.from_dict(values | own | (config or {}))
    rows, held_out = examples(kind, count=10), examples(kind, count=3, seed=1)
    return made.trainer_class(MODELS[model](dropout), settings, rows, eval_examples=held_out, **options)


@EACH
def test_the_cut_of_a_step_changes_nothing(method, examples, history):
    whole = history(_trainer(method, examples, {"max_tokens_per_batch": None}))
    cuts = [
        {"max_tokens_per_batch": 1},
        {"max_tokens_per_batch": 25, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    ]
    for cut in cuts:
        for a, b in zip(whole, history(_trainer(method, examples, cut)), strict=True):
            assert set(a) == set(b)
            names = [name for name in a if name != "num_tokens"]
            assert [b[name] for name in names] == pytest.approx(
                [a[name] for name in names], rel=1e-3, abs=2e-5
            )


@EACH
def test_resumed_equals_uninterrupted(method, examples, tmp_path):
    config = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "warmup_steps": 2}  # epochs have 3 steps

    def make(name):
        (tmp_path / name).mkdir(exist_ok=True)
        return _trainer(method, examples, config, dropout=0.1, run=RunFolder(tmp_path / name))

    assert_resumed_equals_uninterrupted(make)
    rows = [
        [
            {k: v for k, v in row.items() if k not in MACHINE_KEYS}
            for row in RunFolder(tmp_path / name).read_metrics()
        ]
        for name in ("straight", "halted")
    ]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 4]


@EACH
def test_evaluation_leaves_everything_as_it_was(method, examples):
    trainer = _trainer(method, examples, {"max_tokens_per_batch": 30})
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    trainer.scorer.train()
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first == pytest.approx(again)
    assert trainer.scorer.training
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))
    trainer.train()
    after = trainer.evaluate()
    assert set(after) == set(first)
    assert after["eval_loss"] != first["eval_loss"]
