"""Layers that are computed again in the backward pass, under the name that transformers has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def recompute_layers(model: Any, options: Mapping[str, Any] | None = None) -> None:
    """Compute each layer of a model again in the backward pass, in train mode, to save memory.

    Args:
        model: a transformers model, or one of this package.
        options: arguments of `torch.utils.checkpoint`; None for `use_reentrant=False`.
    """
    newer = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.24
    (newer or model.gradient_checkpointing_enable)(dict(options or {"use_reentrant": False}))
