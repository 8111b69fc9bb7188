"""The k-th largest magnitude of a streamed tensor, exactly, in memory that does not grow with it.

Floating-point numbers without a sign are ordered as their bit patterns are. A histogram of the highest 15
bits finds the bin of the k-th largest; histograms of the next 16 bits, of the elements in that bin alone,
refine it. That is two passes over float32 and four over float64, whatever the values, and no sorting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

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
