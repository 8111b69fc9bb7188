"""torch.compile for packed batches, whose sizes differ from one to the next."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

_LOG = logging.getLogger(__name__)


def compile_model(model: Any) -> Any:
    """Compile a decoder's layers but for attention, in place, for token streams of any length.

    Compiled are the norms and the MLP of every layer (and LoRA adapters in them): that is where kernels fuse.
    Attention is left as it is: its tables are made for every batch, on the host, and its work is in
    kernels that are compiled already. Parameters, their names and what is saved stay the same.

    The first batch waits for the compiler; layers alike share its work. Meant for GPUs, where norms and gates
    wait for memory. On a CPU it gains nothing, and costs what faster linear layers gain there (`cpu_linear`),
    which compiled code does not use; a warning in the log says so.

    Args:
        model: a transformers decoder, a PeftModel around one, or a module of this package that holds one.

    Returns:
        The same model.
    """
    if next(model.parameters()).device.type == "cpu":
        _LOG.warning("torch.compile gains nothing on a CPU; leave it out there")
    for layer in decoder_layers(model):
        for child in layer.children():
            if not any("Attention" in type(module).__name__ for module in child.modules()):
                child.compile(dynamic=True)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks in a module, by what transformers says must not be split."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
