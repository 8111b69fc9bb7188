"""Losses of a policy on preference pairs: DPO and its relatives, SimPO, ORPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf_algos._flat import check_flat

DPOLossType = Literal["sigmoid", "hinge", "ipo", "robust"]
"""The losses of `dpo_loss`."""


@dataclass(frozen=True)
class PreferenceLoss:
    """Loss of P pairs and the implicit rewards of both sides; only `loss` carries a gradient."""

    loss: Tensor
    """Scalar, the sum over the pairs."""
    chosen_rewards: Tensor
    """(P,), without gradient."""
    rejected_rewards: Tensor
    """(P,), without gradient."""


@dataclass(frozen=True)
class OddsRatioLoss(PreferenceLoss):
    """A `PreferenceLoss` of odds."""

    log_odds: Tensor
    """(P,) log of the chosen completion's odds over the rejected one's, without gradient."""


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float,
    loss_type: DPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> PreferenceLoss:
    """Direct preference optimisation, summed over pairs.

    With h = (logp⁺ - ref⁺) - (logp⁻ - ref⁻) and ε = label_smoothing:

    - sigmoid: -(1 - ε) log sigmoid(β h) - ε log sigmoid(-β h).  DPO, https://arxiv.org/abs/2305.18290, eq. 7;
      ε > 0: conservative DPO, https://ericmitchell.ai/cdpo.pdf.
    - robust: [-(1 - ε) log sigmoid(β h) + ε log sigmoid(-β h)] / (1 - 2ε): unbiased when a share ε of the
      labels is flipped.  https://arxiv.org/abs/2403.00409.
    - hinge: max(0, 1 - β h).  SLiC, https://arxiv.org/abs/2305.10425; RSO, https://arxiv.org/abs/2309.06657.
    - ipo: (h' - 1 / (2β))², where h' has each log-ratio divided by its completion's length.
      https://arxiv.org/abs/2310.12036, eq. 17, with β for τ.

    Rewards are r = β (logp - ref), for every loss.

    Args:
        chosen_logps: (P,) log π of the chosen completions, summed over their tokens, with gradient.
        rejected_logps: (P,) the same of the rejected completions.
        ref_chosen_logps: (P,) log-probability of the chosen completions under the reference, no gradient.
        ref_rejected_logps: (P,) the same of the rejected completions.
        beta: > 0; how closely to stay to the reference.
        loss_type: which loss.
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong; for sigmoid and robust only.
        lengths: (P,) and (P,) tokens of the chosen and the rejected completions; ipo needs them.

    Returns:
        The sum over the P pairs, and the rewards of both sides.

    Raises:
        ValueError: shapes differ, a setting is out of range, or the loss type cannot use it.

    Note:
        Log-probabilities are sums over tokens: averaging them is another method (`simpo_loss`).  Only ipo
        averages, as its authors do.
    """
    check_flat(
        chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
    chosen, rejected = chosen_logps - ref_chosen_logps, rejected_logps - ref_rejected_logps
    if loss_type == "ipo":
        per_pair = _ipo(chosen, rejected, lengths, beta=beta, label_smoothing=label_smoothing)
    else:
        per_pair = _margin_loss(beta * (chosen - rejected), loss_type, label_smoothing)
    return PreferenceLoss(per_pair.sum(), beta * chosen.detach(), beta * rejected.detach())


def simpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    lengths: tuple[Tensor, Tensor],
    beta: float,
    simpo_gamma: float,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """Simple preference optimisation, without a reference, summed over pairs.

    L = -Σ_p [(1 - ε) log sigmoid(h_p) + ε log sigmoid(-h_p)],  h = β logp⁺ / |y⁺| - β logp⁻ / |y⁻| - γ

    https://arxiv.org/abs/2405.14734, eq. 6; ε as in `dpo_loss`.  Rewards are r = β logp / |y|.

    Args:
        chosen_logps: (P,) log π of the chosen completions, summed over their tokens, with gradient.
        rejected_logps: (P,) the same of the rejected completions.
        lengths: (P,) and (P,) tokens of the chosen and the rejected completions, >= 1.
        beta: > 0; scale of the rewards.
        simpo_gamma: γ >= 0, the target margin between the rewards, in their units: not divided by β.
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong.

    Returns:
        The sum over the P pairs, and the rewards of both sides.

    Raises:
        ValueError: shapes differ, or a setting is out of range.

    Note:
        β is 10 to 100 times DPO's, because an average log-probability is that much smaller than a sum.
    """
    check_flat(chosen_logps, rejected_logps=rejected_logps)
    chosen = beta * _per_token(chosen_logps, lengths[0])
    rejected = beta * _per_token(rejected_logps, lengths[1])
    per_pair = _margin_loss(chosen - rejected - simpo_gamma, "sigmoid", label_smoothing)
    return PreferenceLoss(per_pair.sum(), chosen.detach(), rejected.detach())


def orpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, *, lengths: tuple[Tensor, Tensor], beta: float
) -> OddsRatioLoss:
    """The preference term of odds ratio preference optimisation, summed over pairs.

    L = -β Σ_p log sigmoid(h_p),  h = log odds(y⁺) - log odds(y⁻),
    odds(y) = p / (1 - p),  p = exp(logp / |y|)

    https://arxiv.org/abs/2403.07691, eq. 4 and 7, with β for the λ of eq. 6, whose other term is the
    likelihood of what was chosen, see `chosen_nll`.  Rewards are r = β logp / |y|.

    Args:
        chosen_logps: (P,) log π of the chosen completions, summed over their tokens, with gradient.
        rejected_logps: (P,) the same of the rejected completions.
        lengths: (P,) and (P,) tokens of the chosen and the rejected completions, >= 1.
        beta: > 0; weight of the term.

    Returns:
        The sum over the P pairs, the rewards of both sides and the log odds ratios.

    Raises:
        ValueError: shapes differ.
    """
    check_flat(chosen_logps, rejected_logps=rejected_logps)
    chosen, rejected = _per_token(chosen_logps, lengths[0]), _per_token(rejected_logps, lengths[1])
    log_odds = _log_odds(chosen) - _log_odds(rejected)
    loss = -beta * F.logsigmoid(log_odds).sum()
    return OddsRatioLoss(loss, beta * chosen.detach(), beta * rejected.detach(), log_odds.detach())


def chosen_nll(chosen_logps: Tensor, *, tokens_per_pair: float | Tensor) -> Tensor:
    """Negative log-likelihood of the chosen completions per token, to add to a sum over pairs.

    L = -Σ_p logp⁺_p / n̄,  n̄ = mean |y⁺| over the pairs of the whole step

    Divided by the number of pairs of the step, this is the mean over all chosen tokens of the step.  It is
    CPO's regulariser, https://arxiv.org/abs/2401.08417, there without n̄, and the first term of ORPO,
    https://arxiv.org/abs/2403.07691, eq. 6.

    Args:
        chosen_logps: (P,) log π of the chosen completions, summed over their tokens, with gradient.
        tokens_per_pair: n̄ > 0, over all batches and processes of the step.

    Returns:
        Scalar, with gradient.

    Note:
        A mean over one batch's own tokens would depend on how the step was cut.
    """
    check_flat(chosen_logps)
    return -chosen_logps.sum() / tokens_per_pair


def _margin_loss(margin: Tensor, loss_type: str, label_smoothing: float) -> Tensor:
    """(P,) losses of scaled reward margins (P,)."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing!r}")
    if loss_type == "hinge":
        _refuse_smoothing(loss_type, label_smoothing)
        return F.relu(1 - margin)
    kept, flipped = -F.logsigmoid(margin), -F.logsigmoid(-margin)
    if loss_type == "sigmoid":
        return (1 - label_smoothing) * kept + label_smoothing * flipped
    if loss_type == "robust":
        return ((1 - label_smoothing) * kept - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    raise ValueError(f"loss_type must be one of {get_args(DPOLossType)}, got {loss_type!r}")


def _ipo(
    chosen: Tensor,
    rejected: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    _refuse_smoothing("ipo", label_smoothing)
    if lengths is None:
        raise ValueError("the ipo loss needs lengths=(chosen, rejected): it averages log-ratios over tokens")
    gap = _per_token(chosen, lengths[0]) - _per_token(rejected, lengths[1])
    return (gap - 1 / (2 * beta)).square()


def _per_token(logps: Tensor, lengths: Tensor) -> Tensor:
    check_flat(logps, lengths=lengths)
    return logps / lengths


def _log_odds(logps: Tensor) -> Tensor:
    # A probability of exactly 1 would have infinite odds, and no gradient that is a number.
    logps = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    return logps - torch.log(-torch.expm1(logps))


def _refuse_smoothing(loss_type: str, label_smoothing: float) -> None:
    if label_smoothing:
        raise ValueError(f"the {loss_type} loss has no label smoothing; set label_smoothing to 0")
