"""Losses of a policy that samples and of its value function, and its ratios to the policy that sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_algos._flat import check_flat, dense_index, total
from rlhf_algos.losses.surrogates import Surrogate, SurrogateSettings, clipped


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over tokens of a policy loss; scalars, only `loss` carries a gradient."""

    loss: Tensor
    clipped_low: Tensor
    """Tokens with a negative advantage whose ratio lies below `1 - clip_low`: clipping leaves no gradient."""
    clipped_high: Tensor
    """Tokens with a positive advantage whose ratio is above `1 + clip_high`."""
    approx_kl: Tensor
    """k3 estimate, in nats, of KL(old policy || policy), from the tokens the old policy sampled."""


@dataclass(frozen=True)
class RatioStatistics:
    """Statistics of a batch's ratios: scalars without gradient."""

    count: Tensor
    """Ratios there are: one per token, or one per sequence."""
    ratio: Tensor
    """Their sum."""
    low: Tensor
    """How many lie below `1 - clip_low` where the advantage is negative."""
    high: Tensor
    """How many lie above `1 + clip_high` where the advantage is positive."""
    low_min: Tensor
    """Smallest share of a sequence's ratios that count in `low`; inf without a sequence."""
    high_max: Tensor
    """Largest share of a sequence's ratios that count in `high`; -inf without a sequence."""

    @property
    def region(self) -> Tensor:
        """How many are clipped at either bound."""
        return self.low + self.high


@dataclass(frozen=True)
class ValueLoss:
    """Sums over tokens of a clipped value loss; scalars, only `loss` carries a gradient."""

    loss: Tensor
    clipped: Tensor
    """Tokens for which the clipped error was the larger one."""


def policy_ratio(
    logps: Tensor, old_logps: Tensor, *, sequence: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Ratio of the policy's probabilities to the old policy's, of tokens or of whole sequences.

    r_t = exp(logp_t - old_logp_t);  of sequence i: s_i = exp(1/|o_i| Σ_{t in i} (logp_t - old_logp_t))

    GRPO, https://arxiv.org/abs/2402.03300, eq. 3; sequences: GSPO, https://arxiv.org/abs/2507.18071, eq. 7.

    Args:
        logps: (M,) log π of the sampled tokens, <= 0, with gradient.
        old_logps: (M,) log π of the same tokens under the policy that sampled them, without gradient.
        sequence: (M,) integer index of the sequence a token belongs to, for one ratio per sequence; None for
            one per token.
        weights: (M,) tokens of weight 0 are left out of a sequence's mean; None leaves out none.

    Returns:
        (M,) > 0, with gradient; every token of a sequence has the sequence's ratio where `sequence` is given.

    Note:
        A sequence's ratio is the geometric mean of its tokens' ratios, not the ratio of its probabilities,
        and it needs all tokens of the sequence in one call.
    """
    check_flat(logps, old_logps=old_logps, sequence=sequence, weights=weights)
    return _log_ratio(logps, old_logps, sequence, weights).exp()


def clipped_policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
    sequence: Tensor | None = None,
    delta: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate objective of PPO and GRPO, negated, summed over tokens.

    L = -Σ_t w_t · min(min(r_t, delta) A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),  r_t: `policy_ratio`

    PPO, https://arxiv.org/abs/1707.06347, eq. 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476;
    ratios of sequences: GSPO, https://arxiv.org/abs/2507.18071, eq. 5; delta: two-sided clipping of
    INTELLECT-2, https://arxiv.org/abs/2505.07291.

    Args:
        logps: (M,) log π of the sampled tokens, <= 0, with gradient.
        old_logps: (M,) log π of the same tokens under the policy that sampled them, without gradient.
        advantages: (M,) one per token (a sequence's advantage repeated over its tokens), without gradient;
            multiplied by `importance_weights` they correct for another sampler than the old policy.
        clip_low: how far below 1 the ratio may fall, >= 0; `math.inf` bounds it nowhere.
        clip_high: how far above 1 the ratio may rise, >= 0; `math.inf` bounds it nowhere.
        weights: (M,) >= 0, what each token counts, see `token_weights`; None means 1 each. 0 masks a token.
        sequence: (M,) integer index of the sequence a token belongs to, for one ratio per sequence; None for
            one per token.
        delta: bound of the ratio above 1 + clip_high for negative advantages too, > 0; None for none.

    Returns:
        Weighted sums over the M tokens.

    Note:
        The minimum bounds the objective only on the side where moving further would raise it: without delta
        a token with a negative advantage and a large ratio keeps its whole gradient.
    """
    settings = SurrogateSettings(clip_low, clip_high, delta)
    return policy_loss(
        logps, old_logps, advantages, surrogate=clipped, settings=settings, weights=weights, sequence=sequence
    )


def policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    surrogate: Surrogate,
    settings: SurrogateSettings,
    weights: Tensor | None = None,
    sequence: Tensor | None = None,
) -> PolicyLoss:
    """Surrogate objective of GRPO or one of its relatives, negated, summed over tokens.

    L = Σ_t w_t · surrogate(logp_t, r_t, A_t),  r_t: `policy_ratio`

    Args:
        logps: (M,) as for `clipped_policy_loss`, like all tensors.
        old_logps: (M,).
        advantages: (M,).
        surrogate: the loss of a token, one of `SURROGATES`.
        settings: bounds of the ratio.
        weights: (M,) or None.
        sequence: (M,) or None.

    Returns:
        Weighted sums over the M tokens; tokens outside the bounds of `settings` are counted as clipped,
        whatever the surrogate makes of them.
    """
    check_flat(logps, old_logps=old_logps, advantages=advantages, weights=weights, sequence=sequence)
    ratio = _log_ratio(logps, old_logps, sequence, weights).exp()
    per_token = surrogate(logps, ratio, advantages, settings)
    with torch.no_grad():
        bounded = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
        low, high = _clipped(bounded, advantages, settings.clip_low, settings.clip_high)
        log_ratio = logps - old_logps
        divergence = torch.expm1(log_ratio) - log_ratio
    return PolicyLoss(
        loss=total(per_token, weights),
        clipped_low=total(low, weights),
        clipped_high=total(high, weights),
        approx_kl=total(divergence, weights),
    )


@torch.no_grad()
def ratio_statistics(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    delta: float | None = None,
    level: Literal["sequence", "token"] = "token",
) -> RatioStatistics:
    """Count the ratios that `clipped_policy_loss` clips, whatever its tokens count in the loss.

    TRL's `clip_ratio/low_mean` is low / count, its `clip_ratio/low_min` is low_min, and so on.

    Args:
        logps: (M,) as for `clipped_policy_loss`, like all but `level`; without the tokens that are masked.
        old_logps: (M,).
        advantages: (M,).
        sequence: (M,) integer index of the sequence a token belongs to.
        clip_low: bound of the ratio below 1.
        clip_high: bound of the ratio above 1.
        delta: bound for negative advantages too.
        level: whether each token has its ratio or each sequence.

    Returns:
        Sums over tokens, or over sequences at that level, and extremes over sequences.

    Raises:
        ValueError: an unknown level.
    """
    check_flat(logps, old_logps=old_logps, advantages=advantages, sequence=sequence)
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be token or sequence, got {level!r}")
    index, size = dense_index(sequence)
    ratio = _log_ratio(logps, old_logps, sequence if level == "sequence" else None, None).exp()
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    rows = torch.stack([ratio, *_clipped(bounded, advantages, clip_low, clip_high)])
    means = rows.new_zeros(3, len(size)).index_add(1, index, rows) / size
    rows = means if level == "sequence" else rows
    ratios, low, high = rows.sum(1)
    bounds = means.new_tensor([[math.inf], [-math.inf]])
    return RatioStatistics(
        count=rows.new_ones(rows.shape[1]).sum(),
        ratio=ratios,
        low=low,
        high=high,
        low_min=torch.cat([means[1], bounds[0]]).amin(),
        high_max=torch.cat([means[2], bounds[1]]).amax(),
    )


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip_range: float,
    weights: Tensor | None = None,
) -> ValueLoss:
    """Half the squared error of the value function, bounded around the old values, summed over tokens.

    L = ½ Σ_t w_t · max((V_t - R_t)², (clip(V_t, V_old - c, V_old + c) - R_t)²)

    The clipping is of PPO's reference implementation; see detail 9 of
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.

    Args:
        values: (M,) value of the state before each token, with gradient.
        old_values: (M,) the same under the value model that made the advantages, without gradient.
        returns: (M,) targets: advantages + old values, without gradient.
        clip_range: c >= 0, in units of reward; `math.inf` switches clipping off.
        weights: (M,) >= 0, what each token counts; None means 1 each.

    Returns:
        Weighted sums over the M tokens.

    Note:
        It is a maximum, not a minimum: a value that leaves the range the wrong way keeps its gradient.
    """
    check_flat(values, old_values=old_values, returns=returns, weights=weights)
    bounded = old_values + (values - old_values).clamp(-clip_range, clip_range)
    error = (values - returns).square()
    bounded_error = (bounded - returns).square()
    return ValueLoss(
        loss=total(0.5 * torch.maximum(error, bounded_error), weights),
        clipped=total(bounded_error > error, weights),
    )


def _log_ratio(logps: Tensor, old_logps: Tensor, sequence: Tensor | None, weights: Tensor | None) -> Tensor:
    """(M,) log of the ratio of each token, or of the sequence it belongs to."""
    log_ratio = logps - old_logps
    if sequence is None:
        return log_ratio
    counted = torch.ones_like(log_ratio) if weights is None else weights != 0
    index, size = dense_index(sequence)
    sums = log_ratio.new_zeros(2, len(size)).index_add(1, index, torch.stack([log_ratio * counted, counted]))
    return (sums[0] / sums[1].clamp(min=1))[index]


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """(M,) each: whether a token has lost its gradient at the lower bound, at the upper one."""
    low = (ratio < 1 - clip_low) & (advantages < 0)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    return low, high
