"""Tensors that lie in a file as plain numbers, read in pieces; the file is never mapped to memory.

An input that shrinks, or a disk that fails, while it is read is an error here; under a memory map it would
end the process with SIGBUS.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from pathlib import Path

import torch

from rlhf_merge.errors import MergeError, readable, regular

_scratch = threading.local()
"""One buffer of bytes for each thread, for pieces that are converted."""


class OpenFile:
    """A file that is open for reading at any place, from any thread.

    Args:
        path: the file.

    Raises:
        MergeError: it cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        if not hasattr(os, "preadv"):
            raise MergeError("this system cannot read files at a place (preadv); use Linux, macOS or WSL.")
        self.path = path
        with readable(path):
            self._file = os.open(regular(path), os.O_RDONLY | os.O_CLOEXEC)
        self._closed = weakref.finalize(self, os.close, self._file)

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Fill `out`, contiguous, with the bytes from `begin` on."""
        left = out.view(torch.uint8).numpy().data
        with readable(self.path):
            while left:
                count = os.preadv(self._file, [left], begin)
                if not count:
                    raise MergeError(
                        f"{self.path} ended at byte {begin} while it was read, {len(left)} bytes early; it "
                        "was changed or cut short meanwhile: copy it anew and merge again."
                    )
                left, begin = left[count:], begin + count

    def close(self) -> None:
        """Close it; a later `read` fails."""
        self._file = -1
        self._closed()


class FileTensor:
    """A tensor in a file; see `rlhf_merge.tensors.Readable`.

    Args:
        file: it lies in.
        dtype: of its numbers.
        shape: its shape.
        begin: where its first number is, in bytes.
        strides: elements from one index to the next by dimension; None where it is contiguous.
    """

    row_length = 1

    def __init__(
        self,
        file: OpenFile,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        begin: int,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._file, self._begin, self._strides = file, begin, strides
        self.dtype, self.shape = dtype, shape

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements `start` to `stop` of the flattened tensor to `out`, converted to its type."""
        if start == stop:
            return
        if self._strides is not None:
            out.copy_(self._strided(start, stop, self._strides))
        elif out.dtype == self.dtype and out.is_contiguous():
            self._file.read(self._begin + start * self.dtype.itemsize, out)
        else:
            out.copy_(self._numbers(start, stop - start))

    def _numbers(self, first: int, count: int) -> torch.Tensor:
        """Numbers as they lie in the file, in this thread's buffer."""
        size = count * self.dtype.itemsize
        buffer = getattr(_scratch, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = _scratch.buffer = torch.empty(size, dtype=torch.uint8)
        self._file.read(self._begin + first * self.dtype.itemsize, buffer[:size])
        return buffer[:size].view(self.dtype)

    def _strided(self, start: int, stop: int, strides: tuple[int, ...]) -> torch.Tensor:
        """A piece of a tensor that is not contiguous: the rows of its first dimension that it touches."""
        row = math.prod(self.shape[1:])
        first, last = start // row, -(-stop // row)
        shape = (last - first, *self.shape[1:])
        reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        rows = self._numbers(first * strides[0], reach + 1).as_strided(shape, strides)
        return rows.reshape(-1)[start - first * row : stop - first * row]
