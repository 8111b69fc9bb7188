"""Trainers whose evaluation measures how well probabilities are calibrated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_algos.configs.offline import JudgeConfig, RewardConfig
from rlhf_algos.engine.base_trainer import BaseTrainer
from rlhf_algos.losses import calibration_error
from rlhf_models import disable_dropout

_BIN = "calibration/"

ExampleT = TypeVar("ExampleT")


class CalibratedTrainer(BaseTrainer[ExampleT]):
    """A trainer whose losses add `calibration_sums`, from which evaluation makes `eval_calibration`."""

    def __init__(
        self, model: Any, config: RewardConfig | JudgeConfig, examples: Sequence[ExampleT], **options: Any
    ) -> None:
        if config.disable_dropout:
            disable_dropout(model)
        super().__init__(model, config, examples, **options)

    def calibration_sums(self, gaps: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Sums of a batch, one for each bin of what `gaps` returns; nothing but in evaluation.

        `gaps()` are (num_bins,) sums of confidence minus accuracy, see `rlhf_algos.losses.calibration_error`.
        """
        return {f"{_BIN}{b}": gap for b, gap in enumerate(gaps())} if not self.scorer.training else {}

    def evaluate(self) -> dict[str, Any]:
        """See `BaseTrainer.evaluate`; adds `eval_calibration`."""
        metrics: dict[str, Any] = super().evaluate()
        gaps = [metrics.pop(name) for name in list(metrics) if name.startswith(f"eval_{_BIN}")]
        return metrics | {"eval_calibration": float(calibration_error(torch.tensor(gaps), 1))}
