"""Loss functions: tensors and floats in, sums out.

Letters: `M` scored tokens of a packed batch, `Q` sequences, `P` preference pairs.  There is no padding: token
tensors are flat `(M,)` vectors in any order.  Every loss is a **sum** over its entries, and so is every
statistic returned beside it; the caller divides once by the count of the whole optimizer step (all
micro-batches, all processes), which makes the gradient independent of how the step was cut.  The KL
estimators return their `(M,)` terms, because a reward needs them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf_algos._flat import check_flat

__all__ = [
    "BinaryLoss",
    "PairLoss",
    "PolicyLoss",
    "TokenLoss",
    "ValueLoss",
    "binary_cross_entropy",
    "bradley_terry",
    "clipped_policy_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "next_token_loss",
    "value_loss",
]


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


@dataclass(frozen=True)
class TokenLoss:
    """Sum over tokens of the next-token loss, a scalar, in nats."""

    loss: Tensor


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
        loss=_total(per_token, weights),
        clipped_low=_total(low, weights),
        clipped_high=_total(high, weights),
        approx_kl=_total(divergence, weights),
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
        loss=_total(0.5 * torch.maximum(error, bounded_error), weights),
        clipped=_total(bounded_error > error, weights),
    )


def kl_k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token estimate k1 of KL(π || ref) at tokens sampled from π: unbiased, noisy, of either sign.

    k1 = logp - ref_logp.  http://joschu.net/blog/kl-approx.html

    Args:
        logps: (M,) log π of tokens that π sampled, <= 0.
        ref_logps: (M,) log-probability of the same tokens under the reference, <= 0.

    Returns:
        (M,) nats, for the caller to sum.

    Note:
        Use it in a reward, not in a loss: the expected gradient of k1 is zero.
    """
    check_flat(logps, ref_logps=ref_logps)
    return logps - ref_logps


def kl_k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token estimate k2 of KL(π || ref) at tokens sampled from π: biased, low variance, >= 0.

    k2 = ½ (logp - ref_logp)².  http://joschu.net/blog/kl-approx.html

    Args:
        logps: (M,) log π of tokens that π sampled, <= 0.
        ref_logps: (M,) log-probability of the same tokens under the reference, <= 0.

    Returns:
        (M,) nats, for the caller to sum.

    Note:
        The value is biased, but its gradient at on-policy tokens is the unbiased gradient of the KL.
    """
    check_flat(logps, ref_logps=ref_logps)
    return 0.5 * (logps - ref_logps).square()


def kl_k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token estimate k3 of KL(π || ref) at tokens sampled from π: unbiased, low variance, >= 0.

    k3 = r - 1 - log r,  r = ref / π.  http://joschu.net/blog/kl-approx.html; GRPO, https://arxiv.org/abs/2402.03300,
    eq. 4.

    Args:
        logps: (M,) log π of tokens that π sampled, <= 0.
        ref_logps: (M,) log-probability of the same tokens under the reference, <= 0.

    Returns:
        (M,) nats, for the caller to sum.

    Note:
        r is ref over π, not π over ref: the other way round estimates nothing at tokens that π sampled.
    """
    check_flat(logps, ref_logps=ref_logps)
    log_ratio = ref_logps - logps
    return torch.expm1(log_ratio) - log_ratio


def next_token_loss(logps: Tensor, *, weights: Tensor | None = None) -> TokenLoss:
    """Negative log-likelihood of the target tokens, summed.

    L = -Σ_t w_t log π(x_t | x_<t)

    Args:
        logps: (M,) log π of the target tokens, <= 0, with gradient.
        weights: (M,) >= 0, what each token counts; None means 1 each.

    Returns:
        The weighted sum over the M tokens, in nats.

    Note:
        Divide by the scored tokens of the whole step; a mean per micro-batch would favour short ones.
    """
    check_flat(logps, weights=weights)
    return TokenLoss(loss=_total(-logps, weights))


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
    return PairLoss(loss=loss.sum(), correct=_total(gap > 0, None), margin=gap.detach().sum())


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
    return BinaryLoss(loss=loss, correct=_total((scores > 0) == (labels >= 0.5), None))


def _total(values: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of `values` (cast to float when boolean), weighted."""
    if weights is not None:
        return (values * weights).sum()
    return values.sum(dtype=torch.float32) if values.dtype == torch.bool else values.sum()
