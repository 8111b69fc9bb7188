"""KTO: a loss on single labelled completions, and estimates of the KL divergence, its reference point."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_algos._flat import check_flat


@dataclass(frozen=True)
class KTOLoss:
    """Loss of Q labelled completions and their implicit rewards; only `loss` carries a gradient."""

    loss: Tensor
    """Scalar, the sum over the completions."""
    rewards: Tensor
    """(Q,), without gradient."""


def kto_loss(
    logps: Tensor,
    ref_logps: Tensor,
    labels: Tensor,
    *,
    kl: Tensor | float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> KTOLoss:
    """Kahneman-Tversky optimisation, summed over completions.

    L = Σ_q w_q [1 - sigmoid(± β (logp_q - ref_q - z))],  + and w = λ_D where desirable, else - and w = λ_U

    https://arxiv.org/abs/2402.01306, eq. 7.  Rewards are r = β (logp - ref).

    Args:
        logps: (Q,) log π of the completions, summed over their tokens, with gradient.
        ref_logps: (Q,) log-probability of the same completions under the reference, without gradient.
        labels: (Q,) bool, true where the completion is desirable.
        kl: z >= 0, scalar, the reference point in nats: `kto_kl` or `kl_ema`, the same for the whole step;
            no gradient flows into it.
        beta: > 0; how risk-averse the value function is.
        desirable_weight: λ_D > 0.
        undesirable_weight: λ_U > 0.

    Returns:
        The sum over the Q completions, and their rewards.

    Raises:
        ValueError: shapes differ.

    Note:
        The weights do not change the count: the mean is over completions, whatever they weigh.
    """
    check_flat(logps, ref_logps=ref_logps, labels=labels)
    log_ratios = logps - ref_logps
    above = beta * (log_ratios - torch.as_tensor(kl, device=logps.device).detach())
    per_completion = torch.where(
        labels,
        desirable_weight * torch.sigmoid(-above),
        undesirable_weight * torch.sigmoid(above),
    )
    return KTOLoss(per_completion.sum(), beta * log_ratios.detach())


def kto_kl(log_ratio_sum: Tensor, count: Tensor | int) -> Tensor:
    """KTO's estimate of KL(π || ref): the mean log-ratio of mismatched completions, at least 0.

    z = max(0, 1/n Σ_i [log π(y'_i | x_i) - log ref(y'_i | x_i)])

    y'_i is the completion of another prompt than x_i.  https://arxiv.org/abs/2402.01306, section 4.1.

    Args:
        log_ratio_sum: scalar, Σ of logp - ref_logp over the mismatched pairs of all batches and processes
            of the step, each log-probability summed over the completion's tokens.
        count: n > 0, the number of these pairs.

    Returns:
        Scalar in nats, without gradient.

    Note:
        Clamp after the mean over the whole step: means of clamped parts would be too large.
    """
    return (log_ratio_sum.detach() / count).clamp(min=0)


def kl_ema(average: Tensor | float, estimate: Tensor, *, decay: float) -> Tensor:
    """Moving average of KTO's estimates of KL(π || ref) over steps.

    z ← decay · z + (1 - decay) · estimate

    Args:
        average: z so far, scalar in nats; 0 at the start, where the policy is the reference.
        estimate: this step's `kto_kl`.
        decay: in [0, 1); 0 keeps nothing of the past.

    Returns:
        Scalar in nats, without gradient.
    """
    return decay * average + (1 - decay) * estimate.detach()
