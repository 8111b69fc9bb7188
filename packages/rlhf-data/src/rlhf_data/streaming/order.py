"""The order of rows in an epoch: a keyed permutation, of which any part is computed without the rest.

Blocks of rows are permuted and cut into windows; the rows of a window are permuted among themselves. So a
process that goes through an epoch has few blocks open at a time, and yet there is no buffer whose content
would have to be kept: what comes at a position depends on the seed, the epoch and the position only.

A permutation is a Feistel network over the smallest domain of a power of two, walked until it comes out
within the set (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

_ROUNDS = 8
_CHUNK = 1 << 14
"""Positions whose rows are computed together."""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Constants of the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Permutation:
    """A permutation of `0 .. size - 1` that depends on its key; it holds nothing else in memory.

    The key is any values with a `repr` of their own, such as a seed and an epoch.
    """

    size: int
    key: tuple[object, ...]

    def __call__(self, numbers: Numbers) -> Numbers:
        """Return the numbers at these positions, in the shape of `numbers`."""
        values = np.asarray(numbers, dtype=np.int64).astype(np.uint64)
        limit = np.uint64(self.size)
        values = self._network(values)
        while (outside := values >= limit).any():
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    @cached_property
    def _keys(self) -> list[np.uint64]:
        digest = hashlib.sha512(repr(self.key).encode()).digest()
        return [np.uint64(int.from_bytes(digest[8 * i : 8 * i + 8], "little")) for i in range(_ROUNDS)]

    def _network(self, values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        bits = max(2, (self.size - 1).bit_length())
        widths = bits // 2, bits - bits // 2
        left, right = values >> np.uint64(widths[1]), values & np.uint64((1 << widths[1]) - 1)
        for number, key in enumerate(self._keys):
            mixed = right ^ key
            for shift, factor in zip((30, 27), _MIX, strict=True):
                mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
            mask = np.uint64((1 << widths[number % 2]) - 1)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        return (left << np.uint64(widths[1])) | right


def windows_of(sizes: Numbers, *, window: int) -> Numbers:
    """Cut blocks, in their order, into windows of about `window` units; where each starts, and the end.

    `sizes` are those of the blocks; a window ends with the block that fills it.
    """
    ends = np.cumsum(sizes)
    cuts = np.flatnonzero(np.diff(ends // max(1, window), prepend=0)) + 1
    return np.unique(np.concatenate([[0], cuts, [len(sizes)]])).astype(np.int64)


class BlockOrder(Sequence[int]):
    """Rows of an epoch in their order, by position; computed on demand.

    Args:
        starts: number (from 0) of the first row of each block, and of all rows at the end; (blocks + 1,).
        weights: what counts for the size of a window, such as bytes, of each block; (blocks,).
        window: how much of it is open at a time; a set that is not larger is permuted as a whole.
        seed: seed of the order; None keeps the rows as they are.
        epoch: epoch of the training, from 0.
    """

    def __init__(
        self, starts: Numbers, weights: Numbers, *, window: int, seed: int | None, epoch: int
    ) -> None:
        self._starts, self._seed, self._epoch = starts, seed, epoch
        self._chunks = dict[int, Numbers]()
        if seed is None:
            return
        blocks = len(starts) - 1
        self._blocks = Permutation(blocks, (seed, epoch, "blocks"))(np.arange(blocks))
        self._firsts = windows_of(weights[self._blocks], window=window)
        rows = np.diff(starts)[self._blocks]
        self._ends = np.concatenate([[0], np.cumsum(rows)])
        self._positions = self._ends[self._firsts]

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if not isinstance(index, slice):
            return self[index : index + 1 or None][0]
        positions = np.arange(*index.indices(len(self)))
        if self._seed is None or not len(positions):
            return positions.tolist()
        first, last = positions.min() // _CHUNK, positions.max() // _CHUNK
        known = np.concatenate([self._chunk(int(chunk)) for chunk in range(first, last + 1)])
        return known[positions - first * _CHUNK].tolist()

    def _chunk(self, number: int) -> Numbers:
        """Rows of a piece of the order, of which the last few are kept: a step asks for a part of one."""
        if number not in self._chunks:
            while len(self._chunks) > 1:
                self._chunks.pop(next(iter(self._chunks)))
            end = min((number + 1) * _CHUNK, len(self))
            self._chunks[number] = self._rows(np.arange(number * _CHUNK, end))
        return self._chunks[number]

    def _rows(self, positions: Numbers) -> Numbers:
        windows = np.searchsorted(self._positions, positions, side="right") - 1
        found = np.empty_like(positions)
        for window in np.unique(windows):
            here = windows == window
            start, end = self._positions[window : window + 2]
            shuffle = Permutation(int(end - start), (self._seed, self._epoch, int(window)))
            at = start + shuffle(positions[here] - start)
            place = np.searchsorted(self._ends, at, side="right") - 1
            found[here] = self._starts[self._blocks[place]] + at - self._ends[place]
        return found
