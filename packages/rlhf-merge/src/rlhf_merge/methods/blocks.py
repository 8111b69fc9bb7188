"""Tensors in pieces: buffers made once, the inputs of one tensor of the result, and threads over tensors."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf_merge.errors import MergeError

BLOCK = 1 << 18
"""Elements worked on at a time: 1 MB in float32, which stays in a processor's cache. Sums over a tensor are
sums over its blocks, so that results depend neither on the number of threads nor on the memory allowed."""
POLL_SECONDS = 2.0

Item = TypeVar("Item")
Result = TypeVar("Result")
OnBytes = Callable[[int], None]
"""Called with the number of bytes read or written; may be called from several threads."""
Begin = Callable[[int], OnBytes]
"""Called with the bytes of some work as it begins; what it returns is called with the bytes that are done."""
Spaces = Callable[[torch.dtype], "Workspace"]
"""The buffers of the calling thread for a type of the arithmetic."""


class Readable(Protocol):
    """A tensor of a model, wherever it is, read in pieces; safe to read from several threads.

    `dtype` is its type as it is stored. Pieces begin and end at multiples of `row_length` elements, which is
    1 where any piece will do.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    row_length: int

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Write elements `start` to `stop` of the flattened tensor to `out`, converted to its type.

        `out`, (stop - start,), is of a floating-point type, or of the tensor's own.
        """
        ...


class MemoryTensor:
    """A tensor in memory as a `Readable`."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.shape, self.dtype, self.row_length = tensor, tuple(tensor.shape), tensor.dtype, 1

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """See `Readable.read`."""
        out.copy_(self.tensor.reshape(-1)[start:stop])


def piece(tensor: Readable, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
    """Elements `start` to `stop` of the flattened tensor, (stop - start,), in its own type or another."""
    out = torch.empty(stop - start, dtype=dtype or tensor.dtype)
    tensor.read(start, stop, out)
    return out


def read_whole(tensor: Readable, dtype: torch.dtype) -> Tensor:
    """The whole of a small tensor."""
    return piece(tensor, 0, math.prod(tensor.shape), dtype).view(tensor.shape)


def same_values(one: Readable, other: Readable) -> bool:
    """Whether two tensors hold the same values."""
    both = Inputs("", None, (one, other))
    return one.shape == other.shape and all(
        torch.equal(*(piece(tensor, start, stop, both.arithmetic) for tensor in both.all))
        for start, stop in both.ranges()
    )


class Workspace:
    """The buffers of one thread, float32 or float64; each is made at its first use and used again."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def take(self, slot: str, size: int) -> Tensor:
        """A buffer of `size` elements, not cleared; the same memory at each call with `slot`."""
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[slot] = torch.empty(max(size, BLOCK), dtype=self.dtype)
        return buffer[:size]

    def take_rows(self, slot: str, rows: int, size: int) -> Tensor:
        """A buffer of shape (rows, size); see `take`."""
        return self.take(slot, rows * size).view(rows, size)


@dataclass(frozen=True)
class Inputs:
    """Inputs of one tensor of the result: a base, if the method has one, and models, all of one shape.

    Random masks are drawn from `name` and `seed`. `labels` are what messages call the base, first, and the
    models. `on_read` is called with the bytes of every block that was read.
    """

    name: str
    base: Readable | None
    models: tuple[Readable, ...]
    labels: tuple[str, ...] = ()
    seed: int = 0
    on_read: OnBytes | None = None

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

    def read(self, tensor: Readable | None, start: int, stop: int, out: Tensor) -> Tensor:
        """Read a block of the base or of a model; one that holds NaN or an infinity is refused."""
        assert tensor is not None, "the method has a base"
        tensor.read(start, stop, out)
        if self.on_read is not None:
            self.on_read((stop - start) * tensor.dtype.itemsize)
        if not math.isfinite(float(out.sum())) and not bool(torch.isfinite(out).all()):
            first = start + int((~torch.isfinite(out)).to(torch.uint8).argmax())
            place = tuple(int(i) for i in np.unravel_index(first, self.shape))
            number = next(i for i, one in enumerate(self.all) if one is tensor)
            model = self.labels[number] if self.labels else f"input {number}"
            message = f"{model}: {called(self.name)} holds {float(out[first - start])} at {place}; "
            message += "repair it, or leave the model out"
            fields = {"model": model, "tensor": self.name, "index": place}
            raise MergeError(message, code="non_finite_value", **fields)
        return out


def check_range(merged: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse values, (n,), that the type of the result cannot hold."""
    limit = torch.finfo(dtype).max
    low, high = (float(value) for value in torch.aminmax(merged)) if merged.numel() else (0.0, 0.0)
    if not (-limit <= low and high <= limit):
        kind = str(dtype).removeprefix("torch.")
        found = f"{called(name)} would hold {max(-low, high):.4g}, more than {kind} can"
        raise MergeError(f"{found}; choose a wider dtype", code="overflow", tensor=name)


def called(name: str) -> str:
    """How messages call a tensor, which may have no name."""
    return f"tensor {name}" if name else "the tensor"


def working_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The type of the arithmetic: float64 where an input or the output is, float32 otherwise."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def map_tensors(
    work: Callable[[Item, Spaces, OnBytes], Result],
    items: Sequence[Item],
    *,
    threads: int | None = None,
    on_bytes: OnBytes | None = None,
    on_results: Callable[[list[tuple[Item, Result]]], None] = lambda found: None,
) -> list[Result]:
    """Call `work` on every item, in threads; the results are in the order of the items.

    `work` gets an item, the thread's buffers, and a function to call with the bytes of every block; an error
    stops the work on all items. `threads` is how many items at once; None is one for each processor this
    process may use. The calling thread calls `on_results` with finished items, at least every `POLL_SECONDS`.
    """
    if threads is not None and threads < 1:
        raise MergeError(f"threads is {threads}, expected at least 1", code="invalid_value", key="threads")
    stop, local, before = threading.Event(), threading.local(), torch.get_num_threads()

    def space(dtype: torch.dtype) -> Workspace:
        return local.__dict__.setdefault(str(dtype), Workspace(dtype))

    def on_block(count: int) -> None:
        if stop.is_set():
            raise RuntimeError("another thread has failed")
        if on_bytes is not None:
            on_bytes(count)

    pool = ThreadPoolExecutor(threads or processors(), initializer=torch.set_num_threads, initargs=(1,))
    results: dict[int, Result] = {}
    # No waiting for futures: a signal meanwhile may leave their locks held, and threads waiting.
    ended: SimpleQueue[tuple[int, list[Result], BaseException | None]] = SimpleQueue()

    def do(index: int, item: Item) -> None:
        try:
            ended.put((index, [work(item, space, on_block)], None))
        except BaseException as error:  # raised again by the calling thread
            ended.put((index, [], error))

    try:
        for index, item in enumerate(items):
            pool.submit(do, index, item)
        while len(results) < len(items):
            done = _drained(ended)
            found = {index: result for index, made, _ in done for result in made}
            on_results([(items[index], result) for index, result in found.items()])
            results |= found
            _raise_first(error for _, _, error in done)
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)
    return [results[index] for index in range(len(items))]


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise the first error, if there is one."""
    error = next((each for each in errors if each is not None), None)
    if error is not None:
        raise error


def _drained(queue: SimpleQueue[Item]) -> list[Item]:
    """Drain a queue; waits for the first item, but no longer than `POLL_SECONDS`."""
    found: list[Item] = []
    with contextlib.suppress(Empty):
        found.append(queue.get(timeout=POLL_SECONDS))
        while True:
            found.append(queue.get_nowait())
    return found


def processors() -> int:
    """The number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
