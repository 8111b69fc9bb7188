"""Sampling ahead of the trainer, by ordinal, with one process; and in batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ahead_engine import AheadEngine
from online_trainers import PROMPTS, TOKENIZER, gradient, grpo, ppo, rollout
from rlhf_data import RunFolder
from rolled_back import RolledBack, check_prompts

_CLOCK = ("step_time", "time/rollout", "time/score", "time/update", "samples_per_second", "peak_memory_gb")


def run(
    make: Callable[..., Any], engine: Any = None, **settings: Any
) -> tuple[list[dict[str, float]], list[Any]]:
    """Metrics of every step but for the clock, and the final weights."""
    found: list[dict[str, float]] = []
    options: dict[str, Any] = {
        "on_step": lambda step, metrics: found.append({k: v for k, v in metrics.items() if k not in _CLOCK})
    }
    trainer = make(options=options | ({"engine": engine} if engine else {}), prompts_per_batch=1, **settings)
    trainer.train()
    return found, [parameter.detach().clone() for parameter in trainer.parameters]


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("make", [grpo, ppo])
def test_an_engine_that_waits_for_the_newest_weights_is_as_the_trainers_own(make: Any):
    assert same(run(make), run(make, AheadEngine(TOKENIZER, 0)))


def test_step_s_is_sampled_with_the_weights_of_k_steps_before():
    engine = AheadEngine(TOKENIZER, 2)
    metrics, _ = run(grpo, engine, max_steps=6)
    assert len(metrics) == 6
    assert engine.used == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    ratios = [row["sampling/importance_sampling_ratio/mean"] for row in metrics]
    assert ratios[0] == pytest.approx(1, abs=1e-5)
    assert all(abs(ratio - 1) > 1e-4 for ratio in ratios[2:])
    for row in metrics:  # mean absolute difference of log-probs, and extremes around the mean
        low, high = (row[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "max"))
        assert low <= row["sampling/importance_sampling_ratio/mean"] <= high
        assert (
            0 <= row["sampling/sampling_logp_difference/mean"] <= row["sampling/sampling_logp_difference/max"]
        )


def test_after_a_rollback_steps_are_sampled_for_the_prompts_of_the_new_order(tmp_path: Path):
    engine, folder = AheadEngine(TOKENIZER, 2), RunFolder.create(tmp_path / "run", job="grpo")
    trainer = grpo(options={"engine": engine, "run": folder}, max_steps=8, save_steps=2, prompts_per_batch=1)
    trainer.guard = RolledBack(trainer, at=5, to=4)
    check_prompts(trainer)
    trainer.train()
    assert trainer.seed != trainer.config.seed
    assert engine.used == {0: 0, 1: 0, 2: 0, 3: 1, 4: 4, 5: 4, 6: 4, 7: 5}


@pytest.mark.parametrize("make", [grpo, ppo])
def test_advantages_are_weighted_with_the_ratio_to_the_engine(make: Any):
    """One pass on completions whose engine says log-probs 0.1 too low, and has e^0.1 times the gradient."""
    gradients = []
    for shift in (0.0, 0.1):
        trainer = make(
            options={"engine": AheadEngine(TOKENIZER, 1)}, vllm_importance_sampling_mode="token_truncate"
        )
        completions, _ = rollout(trainer)
        for each in completions:
            each.tokens["old_logps"] = torch.tensor(each.rollout.logps)
            each.tokens["sampling_logps"] = each.tokens["old_logps"] - shift
        for batch, rows in trainer.micro_batches(completions):
            trainer.loss(batch, rows).loss.backward()
        gradients.append(gradient(trainer.model))
    torch.testing.assert_close(gradients[1], gradients[0] * math.exp(0.1), rtol=1e-3, atol=1e-6)


def test_batches_of_prompts_are_sampled_apart(monkeypatch: pytest.MonkeyPatch):
    trainer = grpo(prompts_per_batch=2)
    sizes: list[int] = []
    generate = trainer.engine.generate

    def counted(prompts: Any, *rest: Any) -> Any:
        sizes.append(len(prompts))
        return generate(prompts, *rest)

    monkeypatch.setattr(trainer.engine, "generate", counted)
    groups = trainer.sample(PROMPTS[:5], 3, seed=1)
    assert sizes == [2, 2, 1]
    assert [list(group[0].prompt_ids) for group in groups] == [list(p.prompt_ids) for p in PROMPTS[:5]]
    whole = grpo().sample(PROMPTS[:5], 3, seed=1)
    assert [[r.completion_ids for r in g] for g in groups] == [[r.completion_ids for r in g] for g in whole]
