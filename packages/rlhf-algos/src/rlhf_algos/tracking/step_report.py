"""The report of a training step: metrics, pace, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StepReport:
    """A training after one of its steps, and after the checkpoint that belongs to it.

    Args:
        step: counted from 1.
        total: the last step.
        metrics: metrics of this step, including `learning_rate` and `grad_norm`; those of an evaluation,
            where there
            was one, begin with `eval_`.
        logged: whether the step is one of those that `logging_steps` has written; the last one and every
            evaluation are.
        seconds: since training began, or was resumed.
        seconds_left: to the last step, at the mean pace so far.
        tokens_per_second: over the steps since the last logged one; None without `num_tokens`.
        checkpoint: what was written after the step.
    """

    step: int
    total: int
    metrics: Mapping[str, Any]
    logged: bool = True
    seconds: float = 0.0
    seconds_left: float = 0.0
    tokens_per_second: float | None = None
    checkpoint: Path | None = None

    @property
    def evaluation(self) -> dict[str, float]:
        """The metrics of the evaluation, with their names; empty if there was none."""
        return {name: value for name, value in self.metrics.items() if is_evaluation(name)}


def is_evaluation(name: str) -> bool:
    """Whether a metric is one of an evaluation, by its name."""
    return name.startswith("eval_")


OnReport = Callable[[StepReport], None]
"""Callback that receives every step report."""


class Pace:
    """Measures the pace of a training and makes its reports.

    Args:
        total: steps of the whole training.
        step: steps that were done before.
        num_tokens: tokens that were computed before.
    """

    def __init__(self, total: int, *, step: int = 0, num_tokens: float = 0) -> None:
        self._total, self._first = total, step
        self._started = time.perf_counter()
        self._logged_at, self._logged_tokens = self._started, num_tokens

    def report(
        self, step: int, metrics: Mapping[str, Any], *, logged: bool = True, checkpoint: Path | None = None
    ) -> StepReport:
        """The report of a step that is done now; see `StepReport`."""
        now = time.perf_counter()
        seconds = now - self._started
        tokens = metrics.get("num_tokens")
        spent = now - self._logged_at
        rate = (tokens - self._logged_tokens) / spent if tokens is not None and spent > 0 else None
        rate = None if rate is not None and rate < 0 else rate  # after a rollback
        if logged and tokens is not None:
            self._logged_at, self._logged_tokens = now, tokens
        left = (self._total - step) * seconds / max(1, step - self._first)
        return StepReport(step, self._total, metrics, logged, seconds, left, rate, checkpoint)
