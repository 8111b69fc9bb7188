"""Hidden states that gradient checkpointing keeps, kept in main memory until the backward pass needs them."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["offloaded_states"]

_LEAST_BYTES = 1 << 20
"""The size from which a tensor is worth a transfer."""


class _Moved(NamedTuple):
    """A copy in main memory, the device it came from, and the event after which it is whole."""

    copy: Tensor
    device: torch.device
    written: Any


def offloaded_states(
    device: torch.device, *, least_bytes: int = _LEAST_BYTES
) -> contextlib.AbstractContextManager[Any]:
    """Context of a forward pass whose kept hidden states go to main memory, and come back bit for bit.

    With gradient checkpointing these are the inputs of the layers; what a layer computes again is kept where
    it is.  Copies are made on a stream of their own, beside the computation; the memory on the GPU is reused
    as soon as they are whole.

    Args:
        device: where the model is; on a CPU states are copied all the same, for tests.
        least_bytes: smaller tensors stay.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def keep(value: Tensor) -> Tensor | _Moved:
        weight = _is_weight(value if value._base is None else value._base)
        small = value.numel() * value.element_size() < least_bytes
        if weight or small or not value.requires_grad or value.device.type != device.type:
            return value
        copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=stream is not None)
        if stream is None:
            return _Moved(copy.copy_(value), value.device, None)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy.copy_(value, non_blocking=True)
        value.record_stream(stream)
        return _Moved(copy, value.device, stream.record_event())

    def give_back(kept: Tensor | _Moved) -> Tensor:
        if not isinstance(kept, _Moved):
            return kept
        if kept.written is not None:
            torch.cuda.current_stream(kept.device).wait_event(kept.written)
        return kept.copy.to(kept.device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(keep, give_back)


def _is_weight(value: Tensor) -> bool:
    """Whether it is a parameter, or the copy of one in another dtype that autocast makes."""
    if isinstance(value, nn.Parameter):
        return True
    made = value.grad_fn
    if made is None or made.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(made.next_functions[0][0], "variable", None), nn.Parameter)
