"""Helpers of the pure functions: shape checks, dense group indices, weighted sums."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_index(index: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber arbitrary integers (B,) as 0..P-1: the new numbers (B,) and how often each occurs (P,)."""
    _, dense, counts = torch.unique(index, return_inverse=True, return_counts=True)
    return dense, counts


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


def total(values: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of `values` (cast to float when boolean), weighted."""
    if weights is not None:
        return (values * weights).sum()
    return values.sum(dtype=torch.float32) if values.dtype == torch.bool else values.sum()
