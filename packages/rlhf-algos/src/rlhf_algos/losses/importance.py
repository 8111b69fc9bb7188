"""Importance weights, truncated or masked, for tokens that an engine other than the trainer sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlhf_algos._flat import check_flat, dense_index

ImportanceMode = Literal["sequence_mask", "sequence_truncate", "token_mask", "token_truncate"]
"""Whether ratios are of tokens or of sequences, and whether one out of bounds becomes 0 or the bound."""


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weight of each token, and statistics of the mismatch between trainer and engine."""

    weights: Tensor
    """(M,) >= 0, without gradient."""
    ratio_min: Tensor
    """Smallest weight, of tokens or of sequences; inf if there is none."""
    ratio_max: Tensor
    """Largest weight; -inf if there is none."""
    ratio_sum: Tensor
    """Sum of the weights."""
    ratio_count: Tensor
    """How many there are: tokens, or sequences in the modes of sequences."""
    difference_max: Tensor
    """Largest |logp - sampling_logp| of a token, in nats; 0 if there is none."""
    difference_sum: Tensor
    """Their sum."""
    difference_count: Tensor
    """Tokens whose sampling log-probability is known."""


@torch.no_grad()
def importance_weights(
    logps: Tensor,
    sampling_logps: Tensor,
    sequence: Tensor,
    *,
    mode: ImportanceMode,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> ImportanceWeights:
    """Ratio of the trainer's probabilities to the sampling engine's, kept within bounds.

    ρ_t = exp(logp_t - sampling_logp_t);  of sequence i: ρ_i = exp(Σ_{t in i} (logp_t - sampling_logp_t))

    - truncate: min(max(ρ, clip_min), clip_max).
    - mask: ρ where clip_min <= ρ <= clip_max, else 0.

    Truncation: https://fengyao.notion.site/off-policy-rl; masking: https://ringtech.notion.site/icepop.

    Args:
        logps: (M,) log-probability of the sampled tokens under the trainer, with the engine's weights and
            at its temperature.
        sampling_logps: (M,) the same under the engine that sampled them; NaN where it reports none: such a
            token counts as equal.
        sequence: (M,) integer index of the sequence a token belongs to.
        mode: see `ImportanceMode`.
        clip_min: lower bound, >= 0; None for none.
        clip_max: upper bound, > 0; None for none.

    Returns:
        Weights of the M tokens, and scalars that add up, or whose extremes are taken, over calls.

    Raises:
        ValueError: an unknown mode.

    Note:
        A sequence's ratio is the product over its tokens, not the mean that `policy_ratio` takes.
    """
    check_flat(logps, sampling_logps=sampling_logps, sequence=sequence)
    if mode not in get_args(ImportanceMode):
        raise ValueError(f"mode must be one of {', '.join(get_args(ImportanceMode))}, got {mode!r}")
    level, action = mode.split("_")
    known = ~sampling_logps.isnan()
    difference = torch.where(known, logps - sampling_logps, 0.0)
    log_ratio, index = difference, None
    if level == "sequence":
        index, size = dense_index(sequence)
        log_ratio = difference.new_zeros(len(size)).index_add(0, index, difference)
    ratio = _within(log_ratio.exp(), clip_min, clip_max, mask=action == "mask")
    distance = difference.abs()
    return ImportanceWeights(
        weights=ratio if index is None else ratio[index],
        ratio_min=torch.cat([ratio, ratio.new_tensor([math.inf])]).amin(),
        ratio_max=torch.cat([ratio, ratio.new_tensor([-math.inf])]).amax(),
        ratio_sum=ratio.sum(),
        ratio_count=torch.ones_like(ratio).sum(),
        difference_max=torch.cat([distance, distance.new_tensor([0.0])]).amax(),
        difference_sum=distance.sum(),
        difference_count=known.to(distance.dtype).sum(),
    )


def _within(ratio: Tensor, low: float | None, high: float | None, *, mask: bool) -> Tensor:
    """Ratios between two bounds; those outside become 0 or the bound."""
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    if mask:
        return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return ratio.clamp(low, high)
