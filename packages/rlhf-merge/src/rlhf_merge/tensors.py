"""What the merge reads: tensors that can be read in pieces."""

from __future__ import annotations

from typing import Protocol

import torch


class Readable(Protocol):
    """A tensor of a model, wherever it is, read in pieces; safe to read from several threads."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Its type as it is stored."""
    row_length: int
    """Pieces must begin and end at multiples of this many elements; 1 where any piece will do."""

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements `start` to `stop` of the flattened tensor to `out`, converted to its type.

        Args:
            start: first element, a multiple of `row_length`.
            stop: end of the elements, a multiple of `row_length`.
            out: (stop - start,), of a floating-point type or, for a tensor of integers, of its own type.
        """
        ...
