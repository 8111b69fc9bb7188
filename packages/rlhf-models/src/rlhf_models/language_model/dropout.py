"""Dropout: removed permanently, or off within a context."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch import nn

_LOG = logging.getLogger(__name__)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability in a model to zero permanently, those of adapters too.

    Covered: dropout modules, and probabilities that layers keep as numbers, such as `attention_dropout`.
    """
    adapters: set[float] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p and "lora_dropout" in name:
                adapters.add(module.p)
            module.p = 0.0
        for key, value in vars(module).items():
            if isinstance(value, float) and "drop" in key:
                setattr(module, key, 0.0)
    if adapters:
        _LOG.warning("lora_dropout %s is without effect: disable_dropout takes all of it away", max(adapters))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context a model is in eval mode; afterwards each of its modules has its own mode again."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
