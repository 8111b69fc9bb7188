"""Phrases that one side of the pairs uses more: weighted log-odds with an informative Dirichlet prior."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlhf_eval.exploration.words import WordTable
from rlhf_eval.stats import benjamini_hochberg

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


@dataclass(frozen=True, eq=False)
class PhraseWords:
    """The words in which phrases are looked for.

    Attributes:
        names: The words that a phrase may have, from 1.
        ids: (m,) number of each word, 0 where it is too rare to be in a phrase.
        documents: (m,) the completion of each, rising; those of a pair are 2i (chosen) and 2i + 1.
        pairs: How many pairs they are from: those with the first four million words.
        copies: How many of these are left out as copies.
    """

    names: list[str]
    ids: np.ndarray
    documents: np.ndarray
    pairs: int
    copies: int


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
    chosen: np.ndarray, rejected: np.ndarray, *, total: float, pairs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted log-odds that a completion has each phrase, and their z-scores.

    With y and y' the completions of n on both sides that have a phrase, N the counts of all phrases on both,
    α = α₀ (y + y')/N, β = α₀ (2n − y − y')/N and α₀ = 500:
    δ = log((y + α)/(n − y + β)) − log((y' + α)/(n − y' + β)), and z is δ over the root of
    1/(y + α) + 1/(n − y + β) + 1/(y' + α) + 1/(n − y' + β). That is Monroe, Colaresi & Quinn 2008, "Fightin'
    words", eq. 15, 16, 19 and 22, https://doi.org/10.1093/pan/mpn018, of completions in place of words: of
    all words a side with longer texts has smaller shares of every phrase.

    Args:
        chosen: (k,) completions of the preferred side with each phrase.
        rejected: (k,) those of the other.
        total: sum of such counts over all phrases of this length on both sides.
        pairs: completions of each side.
    """
    y, other = np.asarray(chosen, dtype=float), np.asarray(rejected, dtype=float)
    strength = _PRIOR / max(total, 1)
    prior, against = strength * (y + other), strength * (2 * pairs - y - other)
    sides = [
        # A phrase that every completion has is given half a completion without it.
        (each + prior, np.maximum(pairs - each + against, 0.5))
        for each in (y, other)
    ]
    delta = np.log(sides[0][0] / sides[0][1]) - np.log(sides[1][0] / sides[1][1])
    return delta, delta / np.sqrt(sum(1 / each for side in sides for each in side))


def phrase_words(table: WordTable, *, opening: bool, copies: np.ndarray | None = None) -> PhraseWords:
    """The words in which phrases are looked for.

    Args:
        table: the words of pairs.
        opening: whether only the first 8 words of each completion count.
        copies: (n,) whether a pair is a copy of an earlier one, and so not a separate observation.
    """
    lengths = table.lengths
    ends = np.cumsum(lengths)
    used = np.minimum(lengths, _OPENING_WORDS) if opening else lengths
    if copies is not None:
        used = np.where(np.repeat(copies[: len(lengths) // 2], 2), 0, used)
    room = np.searchsorted(np.cumsum(used), _MOST_IDS, "right") // 2 * 2
    lengths, used, starts = lengths[:room], used[:room], (ends - lengths)[:room]
    within = np.arange(used.sum()) - np.repeat(np.cumsum(used) - used, used)
    ids = table.ids[np.repeat(starts, used) + within]
    documents = np.repeat(np.arange(room, dtype=np.int32), used)
    counts = np.bincount(ids, minlength=len(table.words))[: len(table.words)]
    frequent = np.flatnonzero(counts >= _RAREST)
    frequent = frequent[np.argsort(-counts[frequent], kind="stable")][:_MOST_COMMON]
    numbers = np.zeros(len(counts) + 1, dtype=np.uint16)
    numbers[frequent] = np.arange(1, len(frequent) + 1)
    names = ["", *(table.words[i] for i in frequent.tolist())]
    pairs = int(room) // 2
    left_out = 0 if copies is None else int(np.count_nonzero(copies[:pairs]))
    return PhraseWords(names, numbers[ids], documents, pairs, left_out)


def find_phrases(words: PhraseWords) -> tuple[list[Phrase], int]:
    """Phrases of one to four words that differ between the sides, the largest |z| first.

    A completion counts a phrase once, so that one that repeats itself is one witness. Parts of a longer
    phrase that is nearly as frequent are not tested, which the counts of both sides together decide. Phrases
    with |z| at most 1.96, or a corrected p-value above 5%, are left out.

    Returns:
        The phrases; how many were tested.
    """
    counted = [_count(words.ids, words.documents, n) for n in range(1, _LONGEST + 1)]
    pairs = words.pairs - words.copies
    scores = [log_odds(*counts, total=total, pairs=pairs) for _, counts, total in counted]
    tested = np.concatenate(_not_parts([(keys, sides[0] + sides[1]) for keys, sides, _ in counted]))
    keys = np.concatenate([keys for keys, _, _ in counted])[tested]
    sides = np.concatenate([np.stack(counts, axis=1) for _, counts, _ in counted])[tested]
    deltas, z = (np.concatenate(each)[tested] for each in zip(*scores, strict=True))
    p_values = benjamini_hochberg([2 * NormalDist().cdf(-each) for each in np.abs(z).tolist()])
    kept = np.flatnonzero((np.abs(z) > _SIGNIFICANT) & (np.array(p_values) <= _LEVEL))
    kept = kept[np.argsort(-np.abs(z[kept]), kind="stable")]
    found = []
    for i in kept.tolist():
        chosen, rejected = sides[i].tolist()
        text = _name(int(keys[i]), words.names)
        found.append(Phrase(text, chosen, rejected, float(deltas[i]), float(z[i]), p_values[i]))
    return found, len(keys)


def _count(
    ids: np.ndarray, documents: np.ndarray, n: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], float]:
    """Phrases of n words as rising keys of 16 bits a word, how many completions have each, and their sum."""
    size = max(len(ids) - n + 1, 0)
    keys, whole = np.zeros(size, dtype=np.uint64), np.ones(size, dtype=bool)
    for offset in range(n):
        keys = (keys << np.uint64(16)) | ids[offset : offset + size]
        whole &= ids[offset : offset + size] > 0
    whole &= documents[:size] == documents[n - 1 : n - 1 + size]
    keys, of = keys[whole], documents[:size][whole]
    order = np.argsort(keys, kind="stable")  # completions are in order already
    keys, of = keys[order], of[order]
    first = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    new = first | np.append(True, of[1:] != of[:-1])[: len(keys)]
    found, number, side = keys[first], np.cumsum(first)[new] - 1, of[new] % 2
    chosen, rejected = (np.bincount(number[side == each], minlength=len(found)) for each in (0, 1))
    kept = chosen + rejected >= _RAREST
    return found[kept], (chosen[kept], rejected[kept]), float(chosen.sum() + rejected.sum())


def _name(key: int, names: list[str]) -> str:
    numbers = []
    while key:
        numbers.append(key & 0xFFFF)
        key >>= 16
    return " ".join(names[number] for number in reversed(numbers))


def _not_parts(phrases: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Whether a phrase says something that no longer one that has it as a part says as often.

    `phrases` are keys and counts of the phrases of one word, of two, and so on. A part of a phrase is in as
    many completions as that at least, so it is among them.
    """
    most = [np.zeros(len(keys), dtype=counts.dtype) for keys, counts in phrases]
    for length, (keys, counts) in enumerate(phrases, start=1):
        for part in range(1, length):
            for dropped in range(length - part + 1):  # words after the part
                mask = np.uint64((1 << 16 * part) - 1)
                at = np.searchsorted(phrases[part - 1][0], keys >> np.uint64(16 * dropped) & mask)
                np.maximum.at(most[part - 1], at, counts)
    return [longest < np.ceil(_SAME * counts) for longest, (_, counts) in zip(most, phrases, strict=True)]
