"""Early stopping, once evaluations no longer improve."""

from __future__ import annotations

import math
from typing import Any


def is_greater_better(metric: str) -> bool:
    """Whether more of a metric is better, judged by its name: yes, unless it ends in `loss`."""
    return not metric.endswith("loss")


class EarlyStopping:
    """Counts evaluations in a row that bring no improvement; the rule is that of transformers.

    An evaluation is an improvement when its value is better than the best so far by more than `threshold`; a
    value that is NaN never is.  The best value follows every better one, however small the step.

    Args:
        metric: name of the value, for `greater_is_better`.
        patience: evaluations in a row without an improvement after which to stop, >= 1; None never stops.
        threshold: in units of the metric, >= 0.
        greater_is_better: None takes it from the metric's name.

    Attributes:
        best: the best value so far, None before the first.
        bad_evaluations: evaluations since the last improvement.
    """

    def __init__(
        self,
        metric: str = "loss",
        patience: int | None = None,
        threshold: float = 0.0,
        greater_is_better: bool | None = None,
    ) -> None:
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 or None, got {patience}")
        if threshold < 0:
            raise ValueError(f"threshold must not be negative, got {threshold}")
        self.metric, self.patience, self.threshold = metric, patience, threshold
        self.greater_is_better = is_greater_better(metric) if greater_is_better is None else greater_is_better
        self.best: float | None = None
        self.bad_evaluations = 0

    def update(self, value: float) -> bool:
        """Take in the value of one more evaluation; whether to stop now."""
        gain = self._gain(value)
        self.bad_evaluations = 0 if gain > self.threshold else self.bad_evaluations + 1
        if gain > 0:
            self.best = value
        return self.reached

    @property
    def reached(self) -> bool:
        """Whether to stop now."""
        return self.patience is not None and self.bad_evaluations >= self.patience

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON values."""
        return {"best": self.best, "bad_evaluations": self.bad_evaluations}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.best, self.bad_evaluations = state["best"], state["bad_evaluations"]

    def _gain(self, value: float) -> float:
        """By how much a value is better than the best so far."""
        if math.isnan(value):
            return -math.inf
        if self.best is None:
            return math.inf
        return value - self.best if self.greater_is_better else self.best - value
