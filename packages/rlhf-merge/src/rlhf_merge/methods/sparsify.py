"""Which elements of a task vector are kept: by magnitude, at random, or at random by their rank in a row.

The k-th largest magnitude of a streamed tensor is found exactly, in memory that does not grow with it:
floating-point numbers without a sign are ordered as their bit patterns are. A histogram of the highest 15
bits finds the bin of the k-th largest; histograms of the next 16 bits, of the elements in that bin alone,
refine it. That is two passes over float32 and four over float64, whatever the values, and no sorting.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_merge.methods.blocks import Workspace


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


LEVELS = 1 << 16
"""Probabilities are multiples of 1/65536: what is kept is divided by the exact probability to keep it."""


class MaskBits:
    """A stream of random 16-bit numbers, the same on every device and however it is cut.

    Args:
        seed: of the merge.
        name: of the tensor.
        model: index of the model.
    """

    def __init__(self, seed: int, name: str, model: int):
        digest = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), dtype=np.uint32)
        self._bits = np.random.SFC64(np.random.SeedSequence([seed, model, *(int(word) for word in digest)]))
        self._left = np.empty(0, dtype=np.int16)

    def take(self, out: Tensor) -> Tensor:
        """Fill `out` with the next numbers, as floating-point whole numbers in [0, 65536).

        Args:
            out: (n,), of the type of the arithmetic.
        """
        missing = out.numel() - len(self._left)
        if missing > 0:
            fresh = self._bits.random_raw(-(-missing // 4)).view(np.int16)
            self._left = np.concatenate([self._left, fresh]) if len(self._left) else fresh
        now, self._left = self._left[: out.numel()], self._left[out.numel() :]
        out.copy_(torch.from_numpy(now))
        return out.add_(LEVELS // 2)


def quantised(probability: float) -> int:
    """The number of levels, of 65536, nearest to a probability in (0, 1]; at least one."""
    return max(1, round(probability * LEVELS))


_HIGH_BITS, _LOW_BITS = 15, 16
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class _Search:
    """The search for one magnitude: the bits known so far, and its rank among the elements that have them."""

    def __init__(self, rank: int):
        self.rank = rank
        self.prefix = 0

    def refine(self, histogram: Tensor, bits: int) -> None:
        """Find the next bits by the counts (2**bits,) of the elements that begin with the known ones."""
        from_the_top = histogram.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_the_top, self.rank))
        found = len(histogram) - 1 - place
        self.rank -= int(from_the_top[place] - histogram[found])
        self.prefix = (self.prefix << bits) | found


def largest_magnitudes(
    blocks: Callable[[], Iterable[tuple[int, Tensor]]],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
) -> list[list[float]]:
    """The k-th largest magnitudes of several streamed tensors.

    Returns:
        For each tensor, its magnitudes in the order of its ranks.
    """
    searches = [[_Search(rank) for rank in wanted] for wanted in ranks]
    shift = dtype.itemsize * 8 - 1 - _HIGH_BITS
    bits = _HIGH_BITS
    while shift >= 0:
        bins = 1 << bits
        counts = [{search.prefix: torch.zeros(bins, dtype=torch.long) for search in of} for of in searches]
        for index, block in blocks():
            values = block.view(_INTEGERS[dtype])
            for prefix, histogram in counts[index].items():
                histogram += _counts(values, prefix, shift, bits).cpu()
        for of, histograms in zip(searches, counts, strict=True):
            for search in of:
                search.refine(histograms[search.prefix], bits)
        shift, bits = shift - _LOW_BITS, _LOW_BITS
    return [[_float(search.prefix, dtype) for search in of] for of in searches]


def _counts(values: Tensor, prefix: int, shift: int, bits: int) -> Tensor:
    """How often each value of the `bits` bits above `shift` occurs among numbers that begin with `prefix`."""
    if bits == _HIGH_BITS:
        return torch.bincount(values >> shift, minlength=1 << bits)
    beginning = prefix << (shift + bits)
    if values.device.type == "cpu":  # numpy compares and selects several times faster than torch on CPUs
        array = values.numpy()
        chosen = torch.from_numpy(array[(array & ~((1 << (shift + bits)) - 1)) == beginning])
    else:
        chosen = values[(values & ~((1 << (shift + bits)) - 1)) == beginning]
    return torch.bincount((chosen >> shift) & ((1 << bits) - 1), minlength=1 << bits)


def _float(pattern: int, dtype: torch.dtype) -> float:
    return float(torch.tensor(pattern, dtype=_INTEGERS[dtype]).view(dtype))
