"""Loss of given tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_algos._flat import check_flat, total


@dataclass(frozen=True)
class TokenLoss:
    """Sum over tokens of the next-token loss, a scalar, in nats."""

    loss: Tensor


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
    return TokenLoss(loss=total(-logps, weights))
