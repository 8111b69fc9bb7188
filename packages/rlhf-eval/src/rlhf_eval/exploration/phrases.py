"""Phrases that one side of the pairs uses more: weighted log-odds with an informative Dirichlet prior."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from rlhf_eval.exploration.words import WordTable
from rlhf_eval.stats import benjamini_hochberg

__all__ = ["Phrase", "find_phrases", "log_odds"]

_LONGEST = 4
_OPENING_WORDS = 8
_RAREST = 10
"""Completions that must have a phrase."""
_PRIOR = 500.0
"""Strength of the prior, in phrases."""
_MOST_COMMON = (1 << 16) - 1
"""Words that phrases are made of: the most frequent ones, so that four fit into 64 bits."""
_MOST_IDS = 4_000_000
_SAME = 0.8
"""A phrase within a longer one is left out where the longer one is this share of it."""
_LEVEL = 0.05
_SIGNIFICANT = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Phrase:
    """A phrase, and how much more one side uses it.

    Attributes:
        text: Its words.
        chosen: Preferred completions that have it.
        rejected: Other completions that have it.
        log_odds: Above 0 where preferred completions have it more often.
        z: log_odds in its standard deviations.
        p_value: Two-sided, corrected for the number of phrases (Benjamini & Hochberg 1995).
    """

    text: str
    chosen: int
    rejected: int
    log_odds: float
    z: float
    p_value: float


def log_odds(
    chosen: np.ndarray, rejected: np.ndarray, totals: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted log-odds of each phrase and their z-scores.

    With y and y' the counts of a phrase w on both sides, n and n' the totals, α_w = α₀ (y_w + y'_w)/(n + n')
    and α₀ = 500: δ_w = log((y_w + α_w)/(n + α₀ − y_w − α_w)) − log((y'_w + α_w)/(n' + α₀ − y'_w − α_w)),
    z_w = δ_w / √(1/(y_w + α_w) + 1/(y'_w + α_w)); Monroe, Colaresi & Quinn 2008, "Fightin' words", eq. 15,
    16, 20 and 22, https://doi.org/10.1093/pan/mpn018.

    Args:
        chosen: (k,) counts on the preferred side.
        rejected: (k,) counts on the other.
        totals: counts of all phrases of this length on both sides, at least the sums of those given.
    """
    y, other = np.asarray(chosen, dtype=float), np.asarray(rejected, dtype=float)
    prior = _PRIOR * (y + other) / max(sum(totals), 1)
    sides = [
        # Where a single phrase is all there is, its odds are those against half an occurrence of another.
        (each + prior, np.maximum(total + _PRIOR - each - prior, 0.5))
        for each, total in zip((y, other), totals, strict=True)
    ]
    delta = np.log(sides[0][0] / sides[0][1]) - np.log(sides[1][0] / sides[1][1])
    return delta, delta / np.sqrt(1 / sides[0][0] + 1 / sides[1][0])


def find_phrases(
    table: WordTable, *, opening: bool, copies: np.ndarray | None = None
) -> tuple[list[Phrase], int, int]:
    """Phrases of one to four words that differ between the sides, the largest |z| first.

    A completion counts a phrase once, so that one that repeats itself is one witness. Parts of a longer
    phrase that is nearly as frequent are not tested, which the counts of both sides together decide. Phrases
    with |z| at most 1.96, or a corrected p-value above 5%, are left out.

    Args:
        table: the words.
        opening: whether only the first 8 words of each completion count.
        copies: (n,) whether a pair is a copy of one before it, and so no witness of its own.

    Returns:
        The phrases; how many were tested; how many pairs they were counted in (those with the first four
        million words).
    """
    ids, documents, pairs = _ids(table, opening, copies)
    names, ids = _common(table, ids)
    phrases: list[Phrase] = []
    for n in range(1, _LONGEST + 1):
        keys, counts, totals = _count(ids, documents, n)
        numbers = zip(keys.tolist(), *counts, *log_odds(*counts, totals), strict=True)
        phrases += [
            Phrase(_name(key, names), int(chosen), int(rejected), float(delta), float(z), 1.0)
            for key, chosen, rejected, delta, z in numbers
        ]
    tested = _without_parts(phrases)
    p_values = benjamini_hochberg([2 * NormalDist().cdf(-abs(each.z)) for each in tested])
    found = [replace(each, p_value=p) for each, p in zip(tested, p_values, strict=True)]
    kept = [each for each in found if abs(each.z) > _SIGNIFICANT and each.p_value <= _LEVEL]
    return sorted(kept, key=lambda phrase: -abs(phrase.z)), len(tested), pairs


def _ids(table: WordTable, opening: bool, copies: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Words and the completion of each, of as many whole pairs as there is room for."""
    lengths = table.lengths
    ends = np.cumsum(lengths)
    used = np.minimum(lengths, _OPENING_WORDS) if opening else lengths
    if copies is not None:
        used = np.where(np.repeat(copies[: len(lengths) // 2], 2), 0, used)
    room = np.searchsorted(np.cumsum(used), _MOST_IDS, "right") // 2 * 2
    lengths, used, starts = lengths[:room], used[:room], (ends - lengths)[:room]
    within = np.arange(used.sum()) - np.repeat(np.cumsum(used) - used, used)
    documents = np.repeat(np.arange(room), used)
    return table.ids[np.repeat(starts, used) + within], documents, int(room) // 2


def _common(table: WordTable, ids: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Names of the words that may be in a phrase, and each word's number among them from 1; 0 for others."""
    counts = np.bincount(ids, minlength=len(table.words))
    frequent = np.flatnonzero(counts >= _RAREST)
    frequent = frequent[np.argsort(-counts[frequent], kind="stable")][:_MOST_COMMON]
    numbers = np.zeros(len(counts), dtype=np.uint64)
    numbers[frequent] = np.arange(1, len(frequent) + 1, dtype=np.uint64)
    return ["", *(table.words[i] if i < len(table.words) else "" for i in frequent.tolist())], numbers[ids]


def _count(
    ids: np.ndarray, documents: np.ndarray, n: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], tuple[float, float]]:
    """Phrases of n words as keys of 16 bits a word, how many completions have each, and the totals."""
    size = max(len(ids) - n + 1, 0)
    keys, whole = np.zeros(size, dtype=np.uint64), np.ones(size, dtype=bool)
    for offset in range(n):
        keys = (keys << np.uint64(16)) | ids[offset : offset + size]
        whole &= ids[offset : offset + size] > 0
    whole &= documents[:size] == documents[n - 1 : n - 1 + size]
    keys, of = keys[whole], documents[:size][whole]
    order = np.argsort(keys, kind="stable")  # completions are in order already
    keys, of = keys[order], of[order]
    new = np.append(True, (keys[1:] != keys[:-1]) | (of[1:] != of[:-1])) if len(keys) else np.zeros(0, bool)
    found, number = np.unique(keys[new], return_inverse=True)
    counts = [np.bincount(number[of[new] % 2 == side], minlength=len(found)) for side in (0, 1)]
    kept = counts[0] + counts[1] >= _RAREST
    return found[kept], (counts[0][kept], counts[1][kept]), (float(counts[0].sum()), float(counts[1].sum()))


def _name(key: int, names: list[str]) -> str:
    numbers = []
    while key:
        numbers.append(key & 0xFFFF)
        key >>= 16
    return " ".join(names[number] for number in reversed(numbers))


def _without_parts(phrases: list[Phrase]) -> list[Phrase]:
    """The phrases without parts of longer ones that say the same."""
    parts: dict[str, int] = {}
    for phrase in phrases:
        words, total = phrase.text.split(" "), phrase.chosen + phrase.rejected
        for length in range(1, len(words)):
            for start in range(len(words) - length + 1):
                part = " ".join(words[start : start + length])
                parts[part] = max(parts.get(part, 0), total)
    return [
        each for each in phrases if parts.get(each.text, 0) < math.ceil(_SAME * (each.chosen + each.rejected))
    ]
