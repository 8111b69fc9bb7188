"""Tensors of a model with the update of a LoRA adapter added while they are read.

A layer's update is ΔW = s·B·A (arXiv:2106.09685, eq. 3); DoRA (arXiv:2402.09353, eq. 5) gives
W' = m·(W + ΔW)/‖W + ΔW‖, with the norm and m per output of the layer.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import torch

from rlhf_merge.tensors import Readable

_BLOCK_ELEMENTS = 1 << 16
_LEAST_BLOCK_ROWS = 8
_MOST_BLOCK_ROWS = 128
"""A block has about `_BLOCK_ELEMENTS` elements, within these numbers of rows: a block of one row is rounded
otherwise, small blocks cost calls, and a large one is formed twice where a piece ends inside it."""


@dataclass(frozen=True)
class Update:
    """ΔW = scale·L·R in the shape the weight is stored in: L·R is B·A, or its transpose where that is stored.

    Args:
        a: (r, inputs).
        b: (outputs, r).
        scale: s.
        transposed: whether the weight is stored as (inputs, outputs), as embeddings and GPT-2's Conv1D are.
        magnitude: m of DoRA, (outputs,) in any shape; None without.
    """

    a: Readable
    b: Readable
    scale: float
    transposed: bool
    magnitude: Readable | None = None

    def left(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows `first` to `last` of scale·L, (last - first, r)."""
        rank = self.a.shape[0]
        if not self.transposed:
            rows = torch.empty(last - first, rank, dtype=dtype)
            self.b.read(first * rank, last * rank, rows.view(-1))
            return rows.mul_(self.scale)
        columns = torch.empty(rank, last - first, dtype=dtype)
        length = self.a.shape[1]
        for index in range(rank):
            self.a.read(index * length + first, index * length + last, columns[index])
        return columns.mul_(self.scale).t()

    def right(self, dtype: torch.dtype) -> torch.Tensor:
        """R, (r, columns of the weight)."""
        source = self.b if self.transposed else self.a
        whole = read_whole(source, dtype)
        return whole.t() if self.transposed else whole


class LoraTensor:
    """A matrix of the base with an adapter's update applied; see `rlhf_merge.tensors.Readable`.

    Computed in float32, in float64 where the base is.  How a product of matrices is rounded depends on the
    number of rows, so it is formed in blocks that begin at fixed rows, whatever piece is asked for: the same
    bits however the range is cut.  A piece costs up to a block more at either end.

    Args:
        base: the base's tensor, (rows, columns).
        update: the adapter's update.
    """

    def __init__(self, base: Readable, update: Update) -> None:
        self._base = base
        self._update = update
        self._dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
        self._block = min(max(_BLOCK_ELEMENTS // base.shape[1], _LEAST_BLOCK_ROWS), _MOST_BLOCK_ROWS)
        self._column_factors: torch.Tensor | None = None
        self._lock = threading.Lock()
        self.dtype = base.dtype
        self.shape = base.shape
        self.row_length = base.shape[1]

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements `start` to `stop`, multiples of `row_length`, to `out`, converted to its type."""
        assert start % self.row_length == stop % self.row_length == 0, f"{start} to {stop} are not whole rows"
        first, last = start // self.row_length, stop // self.row_length
        if first == last:
            return
        begin = first // self._block * self._block
        end = min(-(-last // self._block) * self._block, self.shape[0])
        rows = self._sum(begin, end)
        if self._update.magnitude is not None:
            if self._update.transposed:
                rows.mul_(self._factors_of_columns(self._update.magnitude))
            else:
                self._scale_rows(rows, begin, self._update.magnitude)
        out.copy_(rows[first - begin : last - begin].view(-1))

    def _sum(self, begin: int, end: int) -> torch.Tensor:
        """Rows of W + ΔW, (end - begin, columns); `begin` is a multiple of the block."""
        rows = torch.empty(end - begin, self.row_length, dtype=self._dtype)
        self._base.read(begin * self.row_length, end * self.row_length, rows.view(-1))
        left = self._update.left(begin, end, self._dtype)
        right = self._update.right(self._dtype)
        for part, factor in zip(rows.split(self._block), left.split(self._block), strict=True):
            part.addmm_(factor.contiguous(), right)
        return rows

    def _scale_rows(self, rows: torch.Tensor, begin: int, magnitude: Readable) -> None:
        """DoRA where a row is an output: m·V/‖V‖ by rows."""
        factors = torch.empty(len(rows), dtype=self._dtype)
        magnitude.read(begin, begin + len(rows), factors)
        for part, factor in zip(rows.split(self._block), factors.split(self._block), strict=True):
            part.mul_((factor / torch.linalg.vector_norm(part, dim=1)).unsqueeze(1))

    def _factors_of_columns(self, magnitude: Readable) -> torch.Tensor:
        """DoRA where a column is an output: m/‖V‖ by columns, which takes one pass over the tensor."""
        with self._lock:
            if self._column_factors is None:
                squares = torch.zeros(self.row_length, dtype=torch.float64)
                for begin in range(0, self.shape[0], self._block):
                    part = self._sum(begin, min(begin + self._block, self.shape[0]))
                    squares += part.double().square_().sum(0)
                whole = read_whole(magnitude, torch.float64).view(-1)
                self._column_factors = (whole / squares.sqrt_()).to(self._dtype)
            return self._column_factors


class ShiftedTensor:
    """A bias of the base plus s times the bias of B (`lora_bias` of peft)."""

    row_length = 1

    def __init__(self, base: Readable, shift: Readable, scale: float) -> None:
        self._base = base
        self._shift = shift
        self._scale = scale
        self._dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
        self.dtype = base.dtype
        self.shape = base.shape

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements `start` to `stop` to `out`, converted to its type."""
        values, shift = torch.empty(2, stop - start, dtype=self._dtype).unbind()
        self._base.read(start, stop, values)
        self._shift.read(start, stop, shift)
        out.copy_(values.add_(shift.mul_(self._scale)))


def same_values(one: Readable, other: Readable) -> bool:
    """Whether two tensors hold the same values."""
    if one.shape != other.shape:
        return False
    total, row = math.prod(one.shape), math.lcm(one.row_length, other.row_length)
    size = max(1, _BLOCK_ELEMENTS // row) * row
    for start in range(0, total, size):
        pieces = torch.empty(2, min(size, total - start))
        for tensor, piece in zip((one, other), pieces, strict=True):
            tensor.read(start, start + len(piece), piece)
        if not torch.equal(*pieces):
            return False
    return True


def read_whole(tensor: Readable, dtype: torch.dtype) -> torch.Tensor:
    """The whole of a small tensor."""
    whole = torch.empty(tensor.shape, dtype=dtype)
    tensor.read(0, whole.numel(), whole.view(-1))
    return whole
