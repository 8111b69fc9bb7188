"""Losses of a policy that samples and of its value function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_algos._flat import check_flat, total

__all__ = ["PolicyLoss", "ValueLoss", "clipped_policy_loss", "value_loss"]


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over tokens of a clipped policy loss; scalars, only `loss` carries a gradient."""

    loss: Tensor
    clipped_low: Tensor
    """Tokens with a negative advantage whose ratio lies below `1 - clip_low`: no gradient there."""
    clipped_high: Tensor
    """Tokens with a positive advantage whose ratio lies above `1 + clip_high`: no gradient there."""
    approx_kl: Tensor
    """k3 estimate, in nats, of KL(old policy || policy), from the tokens the old policy sampled."""


@dataclass(frozen=True)
class ValueLoss:
    """Sums over tokens of a clipped value loss; scalars, only `loss` carries a gradient."""

    loss: Tensor
    clipped: Tensor
    """Tokens for which the clipped error was the larger one."""


def clipped_policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate objective of PPO and GRPO, negated, summed over tokens.

    L = -Σ_t w_t · min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),  r_t = exp(logp_t - old_logp_t)

    PPO, https://arxiv.org/abs/1707.06347, eq. 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476.

    Args:
        logps: (M,) log π of the sampled tokens, <= 0, with gradient.
        old_logps: (M,) log π of the same tokens under the policy that sampled them, without gradient.
        advantages: (M,) one per token (a sequence's advantage repeated over its tokens), without gradient.
        clip_low: how far below 1 the ratio may fall, in [0, 1].
        clip_high: how far above 1 the ratio may rise, >= 0.
        weights: (M,) >= 0, what each token counts; None means 1 each. 0 masks a token, 1 / length averages
            over a sequence.

    Returns:
        Weighted sums over the M tokens.

    Note:
        The minimum bounds the objective only on the side where moving further would raise it: a token with
        a negative advantage and a large ratio keeps its whole gradient.
    """
    check_flat(logps, old_logps=old_logps, advantages=advantages, weights=weights)
    log_ratio = logps - old_logps
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, bounded * advantages)
    with torch.no_grad():
        low = (ratio < 1 - clip_low) & (advantages < 0)
        high = (ratio > 1 + clip_high) & (advantages > 0)
        divergence = torch.expm1(log_ratio) - log_ratio
    return PolicyLoss(
        loss=total(per_token, weights),
        clipped_low=total(low, weights),
        clipped_high=total(high, weights),
        approx_kl=total(divergence, weights),
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
