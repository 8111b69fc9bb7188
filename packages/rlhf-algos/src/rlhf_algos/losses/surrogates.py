"""Surrogates and normalisers of GRPO and its relatives: losses and weights of tokens.

A loss type is one entry of `SURROGATES` and one of `NORMALISERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlhf_algos._flat import check_flat, dense_index

LossType = Literal["bnpo", "cispo", "dapo", "dr_grpo", "grpo", "sapo"]
"""The losses of GRPO: each is a surrogate of `SURROGATES` with a normaliser of `NORMALISERS`."""
LOSS_TYPES: tuple[LossType, ...] = get_args(LossType)
"""Every `LossType`."""


@dataclass(frozen=True)
class SurrogateSettings:
    """Bounds of the ratio; each surrogate reads those it needs."""

    clip_low: float
    """How far below 1 the ratio may fall, >= 0; `math.inf` bounds it nowhere."""
    clip_high: float
    """How far above 1 the ratio may rise; `math.inf` bounds it nowhere."""
    delta: float | None = None
    """Bound of the ratio above 1 + clip_high for negative advantages too, > 0; None for none."""
    temperature_pos: float = 1.0
    """> 0; how fast sapo's gate closes where the advantage is positive."""
    temperature_neg: float = 1.05
    """> 0; the same where it is not."""


@dataclass(frozen=True)
class TokenWeights:
    """Weights of tokens in a sum, and its divisor."""

    weights: Tensor
    """(Q,) float: what each token of a sequence counts; 0 for a sequence that is masked."""
    normaliser: Tensor
    """Scalar integer, to be added up over all sequences of an optimizer step."""


Surrogate = Callable[[Tensor, Tensor, Tensor, SurrogateSettings], Tensor]
"""Negated objective (M,) of tokens, from their log-probs, ratios (both with gradient) and advantages."""
Normaliser = Callable[[Tensor, int | None, Tensor | None], TokenWeights]
"""From the lengths (Q,) of sequences, the longest there may be, and the batches (Q,) they belong to."""


def clipped(logps: Tensor, ratio: Tensor, advantages: Tensor, settings: SurrogateSettings) -> Tensor:
    """-min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A); see `clipped_policy_loss`."""
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    ratio = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def cispo(logps: Tensor, ratio: Tensor, advantages: Tensor, settings: SurrogateSettings) -> Tensor:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log π, sg without gradient.

    No token loses its gradient, however far the ratio is.  MiniMax-M1, https://arxiv.org/abs/2506.13585,
    eq. 4 and 5.
    """
    return -ratio.detach().clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages * logps


def sapo(logps: Tensor, ratio: Tensor, advantages: Tensor, settings: SurrogateSettings) -> Tensor:
    """-(4 / τ) sigmoid(τ (r - 1)) A, with τ by the sign of A: a gate that closes softly around 1.

    https://arxiv.org/abs/2511.20347
    """

    def gate(temperature: float) -> Tensor:
        return torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature)

    gates = torch.where(advantages > 0, gate(settings.temperature_pos), gate(settings.temperature_neg))
    return -gates * advantages


SURROGATES: Mapping[str, Surrogate] = {
    "bnpo": clipped,
    "cispo": cispo,
    "dapo": clipped,
    "dr_grpo": clipped,
    "grpo": clipped,
    "sapo": sapo,
}
"""Loss of a token by loss type; see `policy_loss`."""


def mean_over_sequences(lengths: Tensor, longest: int | None, batches: Tensor | None) -> TokenWeights:
    """The mean over sequences of the mean over a sequence's tokens: arXiv:2402.03300, eq. 3."""
    return TokenWeights(_counted(lengths) / lengths.clamp(min=1), torch.ones_like(lengths).sum())


def mean_over_tokens(lengths: Tensor, longest: int | None, batches: Tensor | None) -> TokenWeights:
    """The mean over tokens: arXiv:2503.14476, eq. 8."""
    return TokenWeights(_counted(lengths), lengths.sum())


def mean_over_batches(lengths: Tensor, longest: int | None, batches: Tensor | None) -> TokenWeights:
    """The mean over batches of equal size of the mean over a batch's tokens: TRL's name for it is bnpo."""
    index, size = dense_index(torch.zeros_like(lengths) if batches is None else batches)
    tokens = torch.zeros_like(size).index_add(0, index, lengths.to(size.dtype))
    return TokenWeights(_counted(lengths) * (size / tokens.clamp(min=1))[index], size.sum())


def share_of_longest(lengths: Tensor, longest: int | None, batches: Tensor | None) -> TokenWeights:
    """The sum over tokens over the sequences times the longest length: arXiv:2503.20783, section 3.2."""
    if longest is None:
        raise ValueError("dr_grpo divides by max_completion_length; give it")
    return TokenWeights(_counted(lengths), torch.ones_like(lengths).sum() * longest)


NORMALISERS: Mapping[str, Normaliser] = {
    "bnpo": mean_over_batches,
    "cispo": mean_over_tokens,
    "dapo": mean_over_tokens,
    "dr_grpo": share_of_longest,
    "grpo": mean_over_sequences,
    "sapo": mean_over_sequences,
}
"""How a loss is averaged over tokens and sequences, by loss type; see `token_weights`."""


def token_weights(
    loss_type: LossType,
    lengths: Tensor,
    *,
    max_completion_length: int | None = None,
    batches: Tensor | None = None,
) -> TokenWeights:
    """Weights of tokens in a policy loss, and the divisor of its sum.

    - grpo, sapo: 1 / length; divided by the sequences.
    - dapo, cispo: 1; divided by the tokens.
    - bnpo: sequences of the batch / its tokens; divided by the sequences.
    - dr_grpo: 1; divided by the sequences times the longest length there may be.

    Args:
        loss_type: one of `LOSS_TYPES`.
        lengths: (Q,) tokens of each sequence that count; 0 for a sequence that is masked.
        max_completion_length: tokens that a completion may have; only dr_grpo needs it.
        batches: (Q,) integer index of the batch that a sequence is averaged in, whole batches of it; only
            bnpo reads it, None for one batch.

    Returns:
        Weights (Q,), and the normaliser: to be added up over the step's micro-batches and processes and
        clamped at 1, for a step of which every token is masked.

    Raises:
        ValueError: an unknown loss type, or dr_grpo without `max_completion_length`.

    Note:
        As in TRL, a masked sequence still counts as a sequence in grpo and dr_grpo, and TRL's dapo divides by
        the tokens of the whole rollout over its optimizer steps, not by each step's own tokens.
    """
    check_flat(lengths, batches=batches)
    if loss_type not in NORMALISERS:
        raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}")
    return NORMALISERS[loss_type](lengths, max_completion_length, batches)


def _counted(lengths: Tensor) -> Tensor:
    """(Q,) 1 for a sequence with tokens, 0 for one that is masked."""
    return (lengths > 0).to(torch.float32)
