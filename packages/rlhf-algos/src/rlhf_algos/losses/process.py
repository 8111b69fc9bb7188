"""Process rewards: from the scores of a solution's steps to one score, and the ranking of solutions by it.

Labels of single steps are learned by `binary_cross_entropy` on the step scores.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf_algos._flat import check_flat, dense_index
from rlhf_algos.losses.rewards import PairLoss, bradley_terry

StepAggregation = Literal["min", "mean", "last", "product"]
"""The ways of `aggregate_steps`."""


def aggregate_steps(step_scores: Tensor, step_owner: Tensor, *, how: StepAggregation) -> Tensor:
    """One score per solution from the scores of its steps.

    - min: min_t s_t, the weakest step.  https://arxiv.org/abs/2312.08935, section 3.4.
    - mean: 1/T Σ_t s_t.
    - last: s_T, the last step.  https://arxiv.org/abs/2408.03314, section 5.1.
    - product: Σ_t log sigmoid(s_t), the log of the probability that every step is right.
      https://arxiv.org/abs/2305.20050, section 2.6.

    Args:
        step_scores: (M,) logits of "this step is right", the steps of one solution in their order.
        step_owner: (M,) integer in 0..Q-1, the solution a step belongs to; solutions may interleave.
        how: which of the above.

    Returns:
        (Q,) with gradient: logits, or with product a log-probability <= 0.

    Raises:
        ValueError: shapes differ, a solution of 0..Q-1 has no step, or `how` is unknown.

    Note:
        A product or a sum of logits would mean nothing: probabilities multiply.
    """
    check_flat(step_scores, step_owner=step_owner)
    owner, counts = dense_index(step_owner)
    if not torch.equal(owner, step_owner):
        raise ValueError("step_owner must number the solutions 0, 1, 2, ... and leave none without a step")
    empty = step_scores.new_zeros(counts.shape)
    if how == "min":
        return empty.scatter_reduce(0, owner, step_scores, "amin", include_self=False)
    if how == "mean":
        return empty.index_add(0, owner, step_scores) / counts
    if how == "last":
        order = torch.argsort(owner, stable=True)
        return step_scores[order[counts.cumsum(0) - 1]]
    if how == "product":
        return empty.index_add(0, owner, F.logsigmoid(step_scores))
    raise ValueError(f"how must be one of {get_args(StepAggregation)}, got {how!r}")


def outcome_ranking(
    step_scores: Tensor,
    step_owner: Tensor,
    *,
    how: StepAggregation,
    margins: Tensor | None = None,
    center_coefficient: float = 0.0,
) -> PairLoss:
    """Bradley-Terry loss of pairs of solutions, each scored by an aggregate of its steps; summed over pairs.

    L = Σ_p -log sigmoid(R_2p - R_{2p+1} - m_p) + centring,  R_q = `aggregate_steps` of solution q

    Args:
        step_scores: (M,) logits of "this step is right", with gradient.
        step_owner: (M,) integer in 0..2P-1: solution 2p is the chosen one of pair p, 2p + 1 the rejected one.
        how: see `aggregate_steps`.
        margins: (P,), see `bradley_terry`.
        center_coefficient: see `bradley_terry`.

    Returns:
        Sums over the P pairs.

    Raises:
        ValueError: as `aggregate_steps`, or the number of solutions is odd.
    """
    rewards = aggregate_steps(step_scores, step_owner, how=how)
    if rewards.numel() % 2:
        raise ValueError(f"pairs need an even number of solutions, got {rewards.numel()}")
    chosen, rejected = rewards.view(-1, 2).unbind(1)
    return bradley_terry(chosen, rejected, margins=margins, center_coefficient=center_coefficient)
