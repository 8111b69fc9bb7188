"""Sampled completions in the run folder, with what they were rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_algos.rollouts import Completion, StepTable

if TYPE_CHECKING:
    from rlhf_algos.online import OnlineTrainer

__all__ = ["keep_samples"]

_SHOWN = 4
"""Completions of a step that `samples.jsonl` gets."""


def keep_samples(trainer: OnlineTrainer, completions: Sequence[Completion], table: StepTable) -> None:
    """Write the first completions of a step where `sample_steps` says so."""
    every = trainer.config.sample_steps
    if not (every and trainer.run and trainer.parallel.is_main and (trainer.step + 1) % every == 0):
        return
    rows = [
        sample_row(trainer, each, table) | {"advantage": float(each.tokens["advantages"].mean())}
        for each in completions[:_SHOWN]
    ]
    trainer.run.append_samples([{"step": trainer.step + 1, **row} for row in rows])


def sample_row(trainer: OnlineTrainer, completion: Completion, table: StepTable) -> dict[str, Any]:
    """One completion as it is kept: prompt, completion, why it ended, its reward."""
    return {
        "prompt": trainer.tokenizer.decode(completion.rollout.prompt_ids),
        "completion": trainer.tokenizer.decode(completion.rollout.completion_ids, skip_special_tokens=True),
        "finish_reason": completion.rollout.finish_reason,
        "reward": float(table.total[completion.index]),
    }
