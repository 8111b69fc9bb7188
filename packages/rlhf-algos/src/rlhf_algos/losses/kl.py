"""Estimates of a KL divergence at sampled tokens: terms, not sums, because a reward needs them one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlhf_algos._flat import check_flat
from rlhf_algos.losses.policy import policy_ratio

KLEstimator = Literal["k1", "k2", "k3"]
"""The names of `KL_ESTIMATORS`."""


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


def corrected_kl(
    logps: Tensor,
    old_logps: Tensor,
    ref_logps: Tensor,
    *,
    estimator: KLEstimator = "k3",
    sequence: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(π || ref) at tokens sampled from an old policy instead of π.

    π / π_old · k,  k the estimator.  DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.

    Args:
        logps: (M,) log π of the sampled tokens, <= 0, with gradient.
        old_logps: (M,) log π of the same tokens under the policy that sampled them, without gradient.
        ref_logps: (M,) log-probability of the same tokens under the reference, <= 0, without gradient.
        estimator: a name in `KL_ESTIMATORS`.
        sequence: as for `policy_ratio`, where the policy loss has one ratio per sequence.
        weights: as for `policy_ratio`.

    Returns:
        (M,) nats, for the caller to sum; the gradient is through the ratio too.
    """
    ratio = policy_ratio(logps, old_logps, sequence=sequence, weights=weights)
    return ratio * KL_ESTIMATORS[estimator](logps, ref_logps)


KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
}
"""The estimators by name."""
