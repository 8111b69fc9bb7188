"""Trainers whose evaluation measures how well probabilities are calibrated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_algos.engine.base_trainer import BaseTrainer
from rlhf_algos.losses import calibration_error

_BIN = "calibration/"

ExampleT = TypeVar("ExampleT")


class CalibratedTrainer(BaseTrainer[ExampleT]):
    """A trainer whose losses add `calibration_sums`, from which evaluation makes `eval_calibration`."""

    _evaluating = False

    def calibration_sums(self, gaps: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Sums of a batch, one for each bin of what `gaps` returns; nothing but in evaluation.

        `gaps()` are (num_bins,) sums of confidence minus accuracy, see `rlhf_algos.losses.calibration_error`.
        """
        return {f"{_BIN}{b}": gap for b, gap in enumerate(gaps())} if self._evaluating else {}

    def evaluate(self) -> dict[str, Any]:
        """See `BaseTrainer.evaluate`; adds `eval_calibration`."""
        self._evaluating = True
        try:
            metrics = super().evaluate()
        finally:
            self._evaluating = False
        gaps = [metrics.pop(name) for name in list(metrics) if name.startswith(f"eval_{_BIN}")]
        return metrics | {"eval_calibration": float(calibration_error(torch.tensor(gaps), 1))}
