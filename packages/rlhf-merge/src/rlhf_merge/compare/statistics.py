"""Statistics of a tensor that is seen block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Statistics:
    """Of the finite elements seen so far.

    Args:
        count: finite elements.
        mean: of them; NaN where there is none.
        squares: Σ (x - mean)².
        least: smallest magnitude; infinite where there is none.
        largest: largest magnitude; -∞ where there is none.
        zeros: elements equal to 0.
        nan: elements that are NaN.
        inf: elements that are infinite.
    """

    count: int = 0
    mean: float = math.nan
    squares: float = 0.0
    least: float = math.inf
    largest: float = -math.inf
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def norm(self) -> float:
        """L2 norm of the finite elements."""
        return math.sqrt(self.squares + self.count * self.mean**2) if self.count else 0.0

    @property
    def std(self) -> float:
        """Root of the mean squared distance from the mean; NaN where there is no finite element."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def add(self, values: Tensor, scratch: Tensor) -> None:
        """Take in a block.

        Two sets are put together by Chan, Golub, LeVeque, "Updating formulae …", 1979, eq. 2.1.
        """
        total = float(values.sum())
        if not math.isfinite(total):  # where all elements are finite, the sum overflowed
            finite = values[values.isfinite()]
            nan = int(values.isnan().sum())
            self.nan, self.inf = self.nan + nan, self.inf + len(values) - len(finite) - nan
            values = finite.double()
            total, scratch = float(values.sum()), torch.empty_like(values)
        if not len(values):
            return
        least, largest = (float(value) for value in torch.abs(values, out=scratch).aminmax())
        self.least, self.largest = min(self.least, least), max(self.largest, largest)
        if least == 0:
            self.zeros += len(values) - int(values.count_nonzero())
        mean, count = total / len(values), self.count + len(values)
        old = self.mean if self.count else 0.0
        self.squares += _squares(values.sub_(mean)) + (mean - old) ** 2 * self.count * len(values) / count
        self.mean = old + (mean - old) * len(values) / count
        self.count = count


def _squares(values: Tensor) -> float:
    """Sum of the squares, also where float32 cannot hold it."""
    squares = float(torch.dot(values, values))
    if math.isfinite(squares):
        return squares
    values = values.double()
    return float(torch.dot(values, values))
