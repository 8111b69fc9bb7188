"""Mismatch of log-probs between engine and trainer, and its importance correction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_algos.configs.online import OnlineConfig
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.losses import importance_weights


@dataclass(frozen=True)
class SamplingCorrection:
    """Importance weights of a micro-batch's advantages, and metrics of the mismatch.

    Args:
        weights: (M,), 1 where the mismatch is only reported.
        means: `sampling/importance_sampling_ratio/mean` and `sampling/sampling_logp_difference/mean`, TRL's
            names, as sums and counts.
        lows: `sampling/importance_sampling_ratio/min`.
        highs: `sampling/importance_sampling_ratio/max` and `sampling/sampling_logp_difference/max`.
    """

    weights: Tensor
    means: dict[str, tuple[Tensor, Tensor]]
    lows: dict[str, Tensor]
    highs: dict[str, Tensor]


def with_correction(output: LossOutput, correction: SamplingCorrection | None) -> LossOutput:
    """A loss that reports a correction too."""
    if correction is None:
        return output
    return replace(
        output,
        means={**output.means, **correction.means},
        lows={**output.lows, **correction.lows},
        highs={**output.highs, **correction.highs},
    )


def sampling_correction(
    old_logps: Tensor, sampling_logps: Tensor, sequence: Tensor, config: OnlineConfig
) -> SamplingCorrection:
    """Bounded ratios of the trainer's probabilities to the engine's; see `importance_weights`.

    Args:
        old_logps: (M,) log-probs by the trainer, without gradient.
        sampling_logps: (M,) those by the engine; NaN where it reports none.
        sequence: (M,) which completion a token belongs to; every completion is whole.
        config: with the bounds.
    """
    found = importance_weights(
        old_logps,
        sampling_logps,
        sequence,
        mode=config.vllm_importance_sampling_mode,
        clip_min=config.vllm_importance_sampling_clip_min,
        clip_max=config.vllm_importance_sampling_clip_max,
    )
    ratio, difference = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"
    return SamplingCorrection(
        found.weights if config.vllm_importance_sampling_correction else torch.ones_like(found.weights),
        means={
            f"{ratio}/mean": (found.ratio_sum, found.ratio_count),
            f"{difference}/mean": (found.difference_sum, found.difference_count),
        },
        lows={f"{ratio}/min": found.ratio_min},
        highs={f"{ratio}/max": found.ratio_max, f"{difference}/max": found.difference_max},
    )
