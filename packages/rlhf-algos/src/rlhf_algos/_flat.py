"""The one shape check of the pure functions."""

from __future__ import annotations

from torch import Tensor


def check_flat(first: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors that would broadcast silently: each must be flat and as long as the first.

    Raises:
        ValueError: the first is not one-dimensional, or another one differs from it in shape.
    """
    if first.ndim != 1:
        raise ValueError(
            f"expected flat tensors, one entry per token or sequence, got shape {tuple(first.shape)}"
        )
    for name, other in others.items():
        if other is not None and other.shape != first.shape:
            raise ValueError(f"{name} must have shape {tuple(first.shape)}, got {tuple(other.shape)}")
