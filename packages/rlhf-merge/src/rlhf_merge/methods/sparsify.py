"""Which elements of a task vector are kept: by magnitude, at random, or at random by their rank in a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_merge.methods.blocks import Workspace
from rlhf_merge.methods.random_masks import LEVELS, MaskBits, quantised


class Sparsifier(Protocol):
    """Keeps some elements of a task vector, which it is given block by block, in order."""

    def __call__(self, delta: Tensor, space: Workspace) -> None:
        """Set the elements of a block that are not kept to zero, and rescale the others; in place."""
        ...


@dataclass(frozen=True)
class Trim:
    """Keeps the magnitudes from `low` to `high`, both included.

    Args:
        low: least magnitude kept.
        high: greatest magnitude kept.
    """

    low: float
    high: float = math.inf

    def __call__(self, delta: Tensor, space: Workspace) -> None:
        """See `Sparsifier`."""
        if self.high < math.inf:
            delta.sub_(torch.hardshrink(delta, self.high))
        delta.copy_(torch.hardshrink(delta, _below(self.low, delta.dtype)))


class RandomDrop:
    """DARE: keeps each element with the same probability, and divides what it keeps by it.

    Args:
        bits: source of the mask.
        density: probability to keep an element, rounded to a multiple of 1/65536.
        rescale: whether to divide.
    """

    def __init__(self, bits: MaskBits, density: float, rescale: bool):
        self._bits, self._levels = bits, quantised(density)
        self._scale = LEVELS / self._levels if rescale else 1.0

    def __call__(self, delta: Tensor, space: Workspace) -> None:
        """See `Sparsifier`."""
        numbers = self._bits.take(space.take("mask", delta.numel()))
        delta.mul_(numbers.neg_().add_(self._levels).clamp_(0, 1))
        if self._scale != 1:
            delta.mul_(self._scale)


class RankDrop:
    """DELLA's MagPrune: the larger an element is within its row, the more probably it is kept.

    The elements of a row have the probabilities density - epsilon (the smallest) to density + epsilon (the
    largest), in even steps of their rank; what is kept is divided by its own probability.

    Args:
        bits: source of the mask.
        density: mean probability to keep an element.
        epsilon: half the spread of the probabilities.
        rescale: whether to divide.
        row_length: of the rows, the tensor's last dimension.
    """

    def __init__(self, bits: MaskBits, density: float, epsilon: float, rescale: bool, row_length: int):
        self._bits, self._density, self._epsilon = bits, density, epsilon
        self._rescale, self._row_length = rescale, row_length

    def __call__(self, delta: Tensor, space: Workspace) -> None:
        """See `Sparsifier`; the block holds whole rows."""
        rows = delta.view(-1, self._row_length)
        ranks = row_ranks(rows.abs()).to(delta.dtype)
        steps = max(1, self._row_length - 1)
        middle = 0.5 if self._row_length == 1 else 0.0
        probability = ranks.add_(middle).mul_(2 * self._epsilon / steps).add_(self._density - self._epsilon)
        levels = probability.mul_(LEVELS).round_().clamp_(1, LEVELS).view(-1)
        numbers = self._bits.take(space.take("mask", delta.numel()))
        delta.mul_(numbers.neg_().add_(levels).clamp_(0, 1))
        if self._rescale:
            delta.mul_(levels.reciprocal_().mul_(LEVELS))


def row_ranks(magnitudes: Tensor) -> Tensor:
    """The place of each element in its row, 0 for the smallest; among equals the first comes first.

    Args:
        magnitudes: (rows, columns), ≥ 0, float32 or float64.
    """
    if magnitudes.device.type != "cpu" or magnitudes.dtype == torch.float64:
        order = torch.sort(magnitudes, dim=1, stable=True).indices
    else:  # numpy sorts integers with vector instructions; the column makes equal magnitudes unequal
        columns = np.arange(magnitudes.shape[1], dtype=np.int64)
        keys = (magnitudes.view(torch.int32).numpy().astype(np.int64) << 32) | columns
        keys.sort(axis=1)
        order = torch.from_numpy(keys & 0xFFFFFFFF)
    places = torch.arange(magnitudes.shape[1], device=magnitudes.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def kept_count(density: float, numel: int) -> int:
    """⌊density · numel⌋, and at least one.

    Args:
        density: in (0, 1].
        numel: elements of the tensor.
    """
    return min(numel, max(1, share_count(density, numel)))


def share_count(share: float, numel: int) -> int:
    """⌊share · numel⌋, with no element lost to rounding: 0.29 of 100 are 29 and 2/3 of 3 are 2.

    Args:
        share: in [0, 1].
        numel: elements of the tensor.
    """
    return int(share * numel * (1 + 1e-14))


def _below(value: float, dtype: torch.dtype) -> float:
    """The number before a value ≥ 0, so that "greater than" it means "at least" the value; 0 stays 0."""
    number = torch.tensor(value, dtype=dtype)
    return float(torch.nextafter(number, torch.zeros_like(number)))
