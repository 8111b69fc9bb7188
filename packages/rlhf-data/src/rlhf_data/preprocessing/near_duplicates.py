"""Groups of texts that are nearly the same, by the Jaccard index of their shingles.

Broder 1997, "On the resemblance and containment of documents": the share of permutations under which two
sets have the same smallest element estimates their Jaccard index. Texts that agree in all of the rows of a
band of such minima become candidates (locality-sensitive hashing), and candidates are compared by their
shingles themselves.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from array import array
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlhf_data.errors import UserError

Unit = Literal["words", "characters"]
_WORD = re.compile(r"\w+")
_BATCH_UNITS = 1 << 16
"""Words or characters hashed at a time, and so texts at most: their hashes stay in the processor's cache."""
_TEXT_BITS, _HASH_BITS, _HASH = np.uint64(16), np.uint64(48), np.uint64((1 << 48) - 1)
_MAX_WORDS = 1 << 20
"""Words whose hashes are remembered."""
_SKETCH = 256
"""Shingle hashes kept of a text; the Jaccard index of texts with no more shingles is exact."""
_RECALL = 0.98
"""Share of pairs at the threshold that the bands are to find."""
_BUCKET = 64
"""Texts of a bucket that are compared each with each; in larger ones, the leaders with all."""
_PAIR_VALUES = 1 << 20
"""Shingle hashes of candidate pairs that are compared at a time."""
_PAD = np.uint64(0xFFFFFFFFFFFFFFFF)
_BASE = 0x9E3779B97F4A7C15
"""Base of the polynomial that hashes a shingle: 2^64 over the golden ratio, odd."""


def near_duplicate_groups(
    texts: Iterable[str],
    *,
    threshold: float = 0.8,
    unit: Unit = "words",
    size: int = 5,
    permutations: int = 128,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Return the group of each text: the index of the first text that is nearly the same.

    Two texts are nearly the same where the Jaccard index of their sets of shingles reaches the threshold;
    groups are what such pairs connect, so they do not depend on the order of the texts. Upper and lower
    case are the same, and so are white space and, between words, punctuation. A text of fewer words than
    `size` is one shingle. The index is exact for texts of up to 256 shingles; of longer ones it is
    estimated from the 256 smallest hashes (bottom-k sketch, standard error at most .03).

    Args:
        texts: read once; about 0.5 KB a text of 40 words is kept, 2.5 KB of a long one.
        threshold: Jaccard index above 0 and at most 1. About 98% of pairs right at it are found, nearly all
            above.
        unit: what a shingle is made of; characters for languages that are written without spaces.
        size: words or characters of a shingle.
        permutations: minima that find the candidates; more find pairs more surely and take longer.
        seed: seed of the permutations.

    Returns:
        int64, one entry a text; `result[i] <= i`, and equal texts always share theirs.

    Raises:
        UserError: a threshold or number out of its range, or another unit.
    """
    finder = NearDuplicateFinder(
        threshold=threshold, unit=unit, size=size, permutations=permutations, seed=seed
    )
    for text in texts:
        finder.add(text)
    return finder.groups()


class NearDuplicateFinder:
    """`near_duplicate_groups` of texts that are given one at a time."""

    def __init__(
        self,
        *,
        threshold: float = 0.8,
        unit: Unit = "words",
        size: int = 5,
        permutations: int = 128,
        seed: int = 0,
    ) -> None:
        _check(threshold, unit, size, permutations)
        self._threshold, self._unit, self._size = threshold, unit, size
        self._sketches = _Sketches(_bands(threshold, permutations), seed)
        self._hashes = _WordHashes()
        self._values: list[int] = []
        self._counts: list[int] = []

    def add(self, text: str) -> None:
        """Add the next text."""
        folded = " ".join(text.lower().split())
        if self._unit == "words":
            # Without any word, as in a row of emoji, the whole text is one.
            units = list(map(self._hashes.__getitem__, _WORD.findall(folded) or [folded]))
        else:
            units = list(map(ord, folded))
        self._values += units
        self._values += [0] * (self._size - len(units))
        self._counts.append(max(self._size, len(units)))
        if len(self._values) >= _BATCH_UNITS:
            self._hash()

    def groups(self) -> NDArray[np.int64]:
        """The group of each text added."""
        self._hash()
        return self._sketches.groups(self._threshold)

    def _hash(self) -> None:
        if self._counts:
            shingles = _shingles(np.array(self._values, np.uint64), self._size)
            self._sketches.add(shingles, np.array(self._counts, np.int64), self._size)
            self._values, self._counts = [], []


def _check(threshold: float, unit: str, size: int, permutations: int) -> None:
    if not 0 < threshold <= 1:
        raise UserError(
            f"threshold must be above 0 and at most 1, got {threshold}", code="invalid_value", key="threshold"
        )
    if unit not in ("words", "characters"):
        raise UserError(f"unit must be words or characters, got {unit!r}", code="invalid_value", key="unit")
    for key, value in {"size": size, "permutations": permutations}.items():
        if value < 1:
            raise UserError(f"{key} must be at least 1, got {value}", code="invalid_value", key=key)


def _bands(threshold: float, permutations: int) -> tuple[int, int]:
    """Bands and rows of each: the longest rows, and so the fewest candidates, that find enough pairs.

    A pair of Jaccard index j agrees in a band of r rows with probability j^r, in one of b bands with
    1 - (1 - j^r)^b.
    """
    for rows in range(permutations, 0, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= _RECALL:
            return bands, rows
    return permutations, 1


class _WordHashes(dict[str, int]):
    """The 64-bit hash of each word, remembered as long as there is room."""

    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        value = int.from_bytes(digest, "little")
        if len(self) < _MAX_WORDS:
            self[word] = value
        return value


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread each value over all 64 bits (the finaliser of MurmurHash3)."""
    values = (values ^ values >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ values >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ values >> np.uint64(33)


def _shingles(values: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Hashes of every `size` neighbours, also of those that reach over the end of a text."""
    mixed, hashes = _mix(values), np.zeros(len(values) - size + 1, np.uint64)
    for offset in range(size):
        hashes = hashes * np.uint64(_BASE) + mixed[offset : len(values) - size + 1 + offset]
    return _mix(hashes)


class _Sketches:
    """Sketches of distinct sets of shingles: the keys of their bands and their smallest hashes."""

    def __init__(self, bands: tuple[int, int], seed: int) -> None:
        self.bands, self.rows = bands
        random = np.random.default_rng(seed)
        count = self.bands * self.rows
        self.factors = random.integers(0, 1 << 32, count, np.uint32) | np.uint32(1)
        self.terms = random.integers(0, 1 << 32, count, np.uint32)
        self.sets: list[NDArray[np.uint64]] = []
        # Arrays of Python's grow in place; joining a list of NumPy's would hold everything twice.
        self.keys, self.hashes = array("Q"), array("Q")
        self.sizes: list[NDArray[np.int64]] = []

    def add(self, shingles: NDArray[np.uint64], counts: NDArray[np.int64], size: int) -> None:
        """Add a batch of texts, by the shingles from each unit on and the number of units of each text."""
        ends = np.cumsum(counts)
        text = np.repeat(np.arange(len(counts)), counts)[: len(shingles)]
        within = np.arange(len(shingles)) + size <= ends[text]
        # The text's number above 48 bits of the hash: one sort of whole numbers orders both.
        pairs = np.sort(text[within].astype(np.uint64) << _HASH_BITS | shingles[within] >> _TEXT_BITS)
        pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])]
        text, shingles = (pairs >> _HASH_BITS).astype(np.int64), pairs & _HASH
        sizes = np.bincount(text, minlength=len(counts))
        starts = np.cumsum(sizes) - sizes
        self.sets.append(np.add.reduceat(_mix(shingles ^ np.uint64(_BASE)), starts))
        self.keys.frombytes(self._band_keys(shingles, starts).tobytes())
        self.hashes.frombytes(shingles[np.arange(len(text)) - starts[text] < _SKETCH].tobytes())
        self.sizes.append(sizes)

    def _band_keys(self, shingles: NDArray[np.uint64], starts: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A hash of the minima of each band, one row a text."""
        folded = (shingles >> _TEXT_BITS).astype(np.uint32)
        keys = np.zeros((len(starts), self.bands), np.uint64)
        for band, row in itertools.product(range(self.bands), range(self.rows)):
            at = band * self.rows + row
            minima = np.minimum.reduceat(folded * self.factors[at] + self.terms[at], starts)
            keys[:, band] = _mix(keys[:, band] * np.uint64(_BASE) + minima)
        return keys

    def groups(self, threshold: float) -> NDArray[np.int64]:
        """The index of the first text of each text's group."""
        if not self.sets:
            return np.zeros(0, np.int64)
        # Equal sets are compared with others once.  np.unique sorts by content, so that its order is
        # that of no file.
        _, first, member = np.unique(np.concatenate(self.sets), return_index=True, return_inverse=True)
        keys = np.frombuffer(self.keys, np.uint64).reshape(-1, self.bands)[first]
        sizes = np.concatenate(self.sizes)
        compare = _Comparison(np.frombuffer(self.hashes, np.uint64), sizes, first, threshold)
        forest = _Forest(len(first))
        for band in range(self.bands):
            for pairs in _candidates(keys[:, band]):
                self._join(pairs, forest, compare)
            for bucket in _large_buckets(keys[:, band]):
                for _ in range(_BUCKET):
                    pairs = np.stack([np.full(len(bucket) - 1, bucket[0]), bucket[1:]], axis=1)
                    self._join(pairs, forest, compare)
                    bucket = bucket[1:][forest.roots[bucket[1:]] != forest.roots[bucket[0]]]
                    if len(bucket) < 2:
                        break
        roots = forest.roots[member]
        earliest = np.full(len(first), len(roots), np.int64)
        np.minimum.at(earliest, roots, np.arange(len(roots)))
        return earliest[roots]

    @staticmethod
    def _join(pairs: NDArray[np.int64], forest: _Forest, compare: _Comparison) -> None:
        pairs = pairs[forest.roots[pairs[:, 0]] != forest.roots[pairs[:, 1]]]
        forest.join(pairs[compare.are_near(pairs)])


def _buckets(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Texts ordered by key, and where each run of equal keys starts and how long it is."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return order, starts, np.diff(np.append(starts, len(order)))


def _candidates(keys: NDArray[np.uint64]) -> Iterator[NDArray[np.int64]]:
    """Pairs of texts with one key, of the buckets in which each is compared with each."""
    order, starts, lengths = _buckets(keys)
    kept = (lengths > 1) & (lengths <= _BUCKET)
    starts, lengths = starts[kept], lengths[kept]
    for distance in range(1, int(lengths.max(initial=0))):
        count = np.maximum(lengths - distance, 0)
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        left = np.repeat(starts, count) + within
        yield np.stack([order[left], order[left + distance]], axis=1)


def _large_buckets(keys: NDArray[np.uint64]) -> Iterator[NDArray[np.int64]]:
    """Texts with one key, where they are too many to compare each with each."""
    order, starts, lengths = _buckets(keys)
    for start, length in zip(starts[lengths > _BUCKET], lengths[lengths > _BUCKET], strict=True):
        yield order[start : start + length]


class _Comparison:
    """Jaccard indices of pairs of texts from the smallest hashes of their shingles."""

    def __init__(
        self,
        hashes: NDArray[np.uint64],
        sizes: NDArray[np.int64],
        texts: NDArray[np.int64],
        threshold: float,
    ) -> None:
        kept = np.minimum(sizes, _SKETCH)
        self.hashes, self.threshold = hashes, threshold
        self.starts, self.kept, self.sizes = (np.cumsum(kept) - kept)[texts], kept[texts], sizes[texts]

    def are_near(self, pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the Jaccard index of each pair reaches the threshold."""
        near = np.zeros(len(pairs), bool)
        sizes = np.sort(self.sizes[pairs], axis=1)
        # No Jaccard index is above the ratio of the sizes.
        open_pairs = np.flatnonzero(sizes[:, 0] / sizes[:, 1] >= self.threshold)
        widths = self.kept[pairs[open_pairs]].max(axis=1, initial=0)
        open_pairs = open_pairs[np.argsort(widths, kind="stable")]
        done = 0
        while done < len(open_pairs):
            ahead = open_pairs[done : done + _PAIR_VALUES]
            widths = 2 * self.kept[pairs[ahead]].max(axis=1)
            count = max(1, int(np.searchsorted(widths * np.arange(1, len(ahead) + 1), _PAIR_VALUES, "right")))
            near[ahead[:count]] = self._jaccard(pairs[ahead[:count]]) >= self.threshold
            done += count
        return near

    def _jaccard(self, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
        width = int(self.kept[pairs].max())
        column = np.arange(width)
        at = np.minimum(self.starts[pairs][:, :, None] + column, len(self.hashes) - 1)
        values = np.where(column < self.kept[pairs][:, :, None], self.hashes[at], _PAD)
        merged = np.sort(values.reshape(len(pairs), 2 * width), axis=1)
        real = merged != _PAD
        new = real.copy()
        new[:, 1:] &= merged[:, 1:] != merged[:, :-1]
        shared = real & ~new
        # Of sets that are not kept whole, the smallest hashes of their union are a sample of it.
        cut = (self.sizes[pairs] > _SKETCH).any(axis=1)
        limit = np.where(cut, _SKETCH, 2 * width)[:, None]
        rank = np.cumsum(new, axis=1)
        return (shared & (rank <= limit)).sum(axis=1) / np.minimum(rank[:, -1:], limit)[:, 0]


class _Forest:
    """Connected components: `roots` names each member's."""

    def __init__(self, count: int) -> None:
        self.roots = np.arange(count)

    def join(self, pairs: NDArray[np.int64]) -> None:
        """Connect the members of every pair."""
        if not len(pairs):
            return
        parents: dict[int, int] = {}

        def root(member: int) -> int:
            while (parent := parents.get(member, member)) != member:
                parents[member] = parents.get(parent, parent)
                member = parent
            return member

        for left, right in self.roots[pairs].tolist():
            low, high = sorted((root(left), root(right)))
            parents[high] = low
        moved = np.arange(len(self.roots))
        for member in list(parents):
            moved[member] = root(member)
        self.roots = moved[self.roots]
