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
        mean: of them.
        squares: Σ (x - mean)².
        least: smallest magnitude; infinite where there is no finite element.
        largest: largest magnitude.
        zeros: elements equal to 0.
        nan: elements that are NaN.
        inf: elements that are infinite.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    largest: float = 0.0
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def norm(self) -> float:
        """L2 norm of the finite elements."""
        return math.sqrt(self.squares + self.count * self.mean**2)

    def add(self, values: Tensor, scratch: Tensor) -> None:
        """Take in a block."""
        total = float(values.sum())
        if not math.isfinite(total):  # where all elements are finite, the sum overflowed
            values, total = self._finite(values.double())
            scratch = torch.empty_like(values)
        if not len(values):
            return
        least, largest = (float(value) for value in torch.abs(values, out=scratch).aminmax())
        self.least, self.largest = min(self.least, least), max(self.largest, largest)
        if least == 0:
            self.zeros += len(values) - int(values.count_nonzero())
        mean = total / len(values)
        self._join(len(values), mean, _squares(values.sub_(mean)))

    def _finite(self, values: Tensor) -> tuple[Tensor, float]:
        """The finite elements and their sum; the others are counted."""
        finite = values[values.isfinite()]
        nan = int(values.isnan().sum())
        self.nan += nan
        self.inf += len(values) - len(finite) - nan
        return finite, float(finite.sum())

    def _join(self, count: int, mean: float, squares: float) -> None:
        """Put two sets together: Chan, Golub, LeVeque, "Updating formulae …", 1979, eq. 2.1."""
        total = self.count + count
        distance = mean - self.mean
        self.squares += squares + distance * distance * self.count * count / total
        self.mean += distance * count / total
        self.count = total


def _squares(values: Tensor) -> float:
    """Sum of the squares, also where float32 cannot hold it."""
    squares = float(torch.dot(values, values))
    if math.isfinite(squares):
        return squares
    values = values.double()
    return float(torch.dot(values, values))
