"""Copies of a player's parameters, and putting them back bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copies(parameters: Sequence[Tensor], device: str | None = None) -> list[Tensor]:
    """Contiguous copies without gradients, on a device or where the parameters are."""
    return [
        parameter.detach().to(device or parameter.device).clone(memory_format=torch.contiguous_format)
        for parameter in parameters
    ]


@torch.no_grad()
def fill(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into parameters, in place."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
