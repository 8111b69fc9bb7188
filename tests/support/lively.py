"""Models whose outputs are far from even."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def lively(model: Any, by: float = 4.0) -> Any:
    """The model itself, its matrices multiplied: a random one's logits are all alike."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(by)
    return model
