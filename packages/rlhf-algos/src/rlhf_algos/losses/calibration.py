"""Calibration of a reward model's probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_algos._flat import check_flat


def pair_calibration(chosen_rewards: Tensor, rejected_rewards: Tensor, *, num_bins: int = 10) -> Tensor:
    """Excess of confidence over accuracy in bins of confidence, summed over preference pairs.

    g_b = Σ_{p in bin b} (c_p - a_p),  c = sigmoid(|r⁺ - r⁻|),  a = 1 where r⁺ > r⁻, ½ where equal, else 0

    Bins have equal width over [½, 1], where confidences lie.

    Args:
        chosen_rewards: (P,).
        rejected_rewards: (P,).
        num_bins: number of bins, >= 1.

    Returns:
        (num_bins,) without gradient, to be added over batches and processes for `calibration_error`.

    Raises:
        ValueError: shapes differ.

    Note:
        Binning sigmoid(r⁺ - r⁻) itself measures nothing: the chosen one always wins, in every bin.
    """
    check_flat(chosen_rewards, rejected_rewards=rejected_rewards)
    gap = (chosen_rewards - rejected_rewards).detach()
    confidence = torch.sigmoid(gap.abs())
    accuracy = torch.heaviside(gap, gap.new_tensor(0.5))
    bins = ((2 * confidence - 1) * num_bins).long().clamp(max=num_bins - 1)
    return gap.new_zeros(num_bins).index_add(0, bins, confidence - accuracy)


def label_calibration(scores: Tensor, labels: Tensor, *, num_bins: int = 10) -> Tensor:
    """Excess of probability over truth in bins of probability, summed over texts.

    g_b = Σ_{i in bin b} (p_i - y_i),  p = sigmoid(s)

    Bins have equal width over [0, 1].

    Args:
        scores: (Q,) logits that the text is true.
        labels: (Q,) in [0, 1].
        num_bins: number of bins, >= 1.

    Returns:
        (num_bins,) without gradient, to be added over batches and processes for `calibration_error`.

    Raises:
        ValueError: shapes differ.
    """
    check_flat(scores, labels=labels)
    probability = torch.sigmoid(scores.detach())
    bins = (probability * num_bins).long().clamp(max=num_bins - 1)
    return probability.new_zeros(num_bins).index_add(0, bins, probability - labels.to(probability.dtype))


def calibration_error(gaps: Tensor, count: Tensor | int) -> Tensor:
    """Expected calibration error: ECE = 1/n Σ_b |g_b|.

    https://arxiv.org/abs/1706.04599, eq. 3.

    Args:
        gaps: (num_bins,) sums of `pair_calibration` or `label_calibration` over everything.
        count: n > 0, the pairs or texts.

    Returns:
        Scalar in [0, 1]; 0 where every bin is right as often as it says.

    Note:
        The value depends on the number of bins; compare only values computed with the same one.
    """
    return gaps.abs().sum() / count
