"""Sampled completions in the run folder, with what they were rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_algos.online.rollouts import Completion, StepTable
from rlhf_data import RunFolder

__all__ = ["keep_samples", "sample_row"]

_SHOWN = 4
"""Completions of a step that `samples.jsonl` gets."""


def keep_samples(
    run: RunFolder, step: int, completions: Sequence[Completion], table: StepTable, tokenizer: Any
) -> None:
    """Write the first completions of a step."""
    rows = [
        sample_row(each, table, tokenizer) | {"advantage": float(each.tokens["advantages"].mean())}
        for each in completions[:_SHOWN]
    ]
    run.append_samples([{"step": step, **row} for row in rows])


def sample_row(completion: Completion, table: StepTable, tokenizer: Any) -> dict[str, Any]:
    """One completion as it is kept: prompt, completion, why it ended, its reward."""
    return {
        "prompt": tokenizer.decode(completion.rollout.prompt_ids),
        "completion": tokenizer.decode(completion.rollout.completion_ids, skip_special_tokens=True),
        "finish_reason": completion.rollout.finish_reason,
        "reward": float(table.total[completion.index]),
    }
