"""Losses of reward models and judges."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from rlhf_algos._flat import check_flat, total


@dataclass(frozen=True)
class PairLoss:
    """Sums over preference pairs; scalars, only `loss` carries a gradient."""

    loss: Tensor
    correct: Tensor
    """Pairs with chosen reward above rejected reward."""
    margin: Tensor
    """Sum of `chosen - rejected`."""


@dataclass(frozen=True)
class BinaryLoss:
    """Sums over labelled sequences; scalars, only `loss` carries a gradient."""

    loss: Tensor
    correct: Tensor
    """Sequences whose score has the sign its label asks for (label >= 0.5: score > 0)."""


def bradley_terry(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    *,
    margins: Tensor | None = None,
    center_coefficient: float = 0.0,
) -> PairLoss:
    """Negative log-likelihood of preference pairs under the Bradley-Terry model, summed over pairs.

    L = Σ_p [-log sigmoid(r⁺_p - r⁻_p - m_p) + c (r⁺_p + r⁻_p)²]

    Margin: Llama 2, https://arxiv.org/abs/2307.09288, eq. 2.  Centring: https://arxiv.org/abs/2312.09244.

    Args:
        chosen_rewards: (P,) with gradient.
        rejected_rewards: (P,) with gradient.
        margins: (P,) how much better the chosen one is, >= 0; None means 0.
        center_coefficient: c >= 0; above 0 it ties the rewards' free constant to a mean of zero.

    Returns:
        Sums over the P pairs; `correct` and `margin` leave `margins` out.
    """
    check_flat(chosen_rewards, rejected_rewards=rejected_rewards, margins=margins)
    gap = chosen_rewards - rejected_rewards
    loss = -F.logsigmoid(gap if margins is None else gap - margins)
    if center_coefficient > 0:
        loss = loss + center_coefficient * (chosen_rewards + rejected_rewards).square()
    return PairLoss(loss=loss.sum(), correct=total(gap > 0, None), margin=gap.detach().sum())


def binary_cross_entropy(scores: Tensor, labels: Tensor) -> BinaryLoss:
    """Cross-entropy of binary labels against logits, summed over sequences; it trains the judge.

    L = -Σ_q [y_q log sigmoid(s_q) + (1 - y_q) log sigmoid(-s_q)]

    Args:
        scores: (Q,) logits of "true", with gradient.
        labels: (Q,) in [0, 1]; a value between 0 and 1 is a soft label.

    Returns:
        Sums over the Q sequences.

    Note:
        `scores` are logits: a sigmoid taken before would be taken twice.
    """
    check_flat(scores, labels=labels)
    loss = F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="sum")
    return BinaryLoss(loss=loss, correct=total((scores > 0) == (labels >= 0.5), None))
