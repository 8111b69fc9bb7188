"""Tensors in pieces: buffers made once, and the inputs of one tensor of the result, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_merge.errors import MergeError
from rlhf_merge.tensors import Readable

BLOCK = 1 << 18
"""Elements worked on at a time: 1 MB in float32, which stays in a processor's cache. Sums over a tensor are
sums over its blocks, so that results depend neither on the number of threads nor on the memory allowed."""


class Workspace:
    """The buffers of one thread; each is made at its first use and used again for every block.

    Args:
        dtype: of the arithmetic, float32 or float64.
        device: where the arithmetic runs.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        self.dtype = dtype
        self.device = torch.device(device)
        self._buffers: dict[str, Tensor] = {}

    def take(self, slot: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer of `size` elements, not cleared; the same memory at each call with `slot`."""
        dtype = dtype or self.dtype
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self._buffers[slot] = torch.empty(max(size, BLOCK), dtype=dtype, device=self.device)
        return buffer[:size]

    def take_rows(self, slot: str, rows: int, size: int) -> Tensor:
        """A buffer of shape (rows, size); see `take`."""
        return self.take(slot, rows * size).view(rows, size)


class MemoryTensor:
    """A tensor in memory as a `Readable`."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.shape, self.dtype, self.row_length = tensor, tuple(tensor.shape), tensor.dtype, 1

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """See `Readable.read`."""
        out.copy_(self.tensor.reshape(-1)[start:stop])


@dataclass(frozen=True)
class Inputs:
    """What one tensor of the result is made from.

    Args:
        name: the tensor's name; random masks are drawn from it.
        base: the base model's tensor, where the method has a base.
        models: the models' tensors, all of one shape.
        labels: what messages call the base (first, where there is one) and the models.
        seed: of random masks.
        on_read: called with the bytes of every block that was read, perhaps from several threads.
    """

    name: str
    base: Readable | None
    models: tuple[Readable, ...]
    labels: tuple[str, ...] = ()
    seed: int = 0
    on_read: Callable[[int], None] | None = None

    @property
    def all(self) -> tuple[Readable, ...]:
        """The base, where there is one, and the models."""
        return (self.base, *self.models) if self.base is not None else self.models

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of every one of them."""
        return self.all[0].shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them as they are stored."""
        return self.numel * sum(tensor.dtype.itemsize for tensor in self.all)

    @property
    def arithmetic(self) -> torch.dtype:
        """The type of the arithmetic on them."""
        return working_dtype([tensor.dtype for tensor in self.all])

    def ranges(self, row_length: int = 1) -> Iterator[tuple[int, int]]:
        """Begin and end of the blocks; always the same ones."""
        row = math.lcm(row_length, *(tensor.row_length for tensor in self.all))
        size = max(1, BLOCK // row) * row
        for start in range(0, self.numel, size):
            yield start, min(start + size, self.numel)

    def read_base(self, start: int, stop: int, out: Tensor) -> Tensor:
        """Read a block of the base; see `read_model`."""
        assert self.base is not None
        return self._read(self.base, 0, start, stop, out)

    def read_model(self, index: int, start: int, stop: int, out: Tensor) -> Tensor:
        """Read a block of a model."""
        return self._read(self.models[index], index + (self.base is not None), start, stop, out)

    def _read(self, tensor: Readable, label: int, start: int, stop: int, out: Tensor) -> Tensor:
        tensor.read(start, stop, out)
        if self.on_read is not None:
            self.on_read((stop - start) * tensor.dtype.itemsize)
        if not math.isfinite(float(out.sum())) and not bool(torch.isfinite(out).all()):
            first = start + int((~torch.isfinite(out)).to(torch.uint8).argmax())
            place = tuple(int(i) for i in np.unravel_index(first, self.shape))
            model = self.labels[label] if self.labels else f"input {label}"
            raise MergeError(
                f"{model}: {called(self.name)} holds {float(out[first - start])} at {place}; repair or "
                "leave out the model",
                code="non_finite_value",
                model=model,
                tensor=self.name,
                index=place,
            )
        return out


def check_range(merged: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse values that a type cannot hold.

    Args:
        merged: (n,), of the type of the arithmetic.
        dtype: of the result.
        name: of the tensor.
    """
    if not merged.numel():
        return
    limit = torch.finfo(dtype).max
    low, high = (float(value) for value in torch.aminmax(merged))
    if not (-limit <= low and high <= limit):
        kind = str(dtype).removeprefix("torch.")
        raise MergeError(
            f"{called(name)} would hold {max(-low, high):.4g}, more than {kind} can; choose a wider dtype",
            code="overflow",
        )


def called(name: str) -> str:
    """How messages call a tensor, which may have no name."""
    return f"tensor {name}" if name else "the tensor"


def working_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The type of the arithmetic: float64 where an input or the output is, float32 otherwise."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
