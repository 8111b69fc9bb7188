"""Words of completions as numbers: what bags of words, first words and phrases are counted from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_eval.exploration.logistic import SparseRows

__all__ = ["Vocabulary", "WordTable", "opening_keys", "word_table", "words_of"]

_CHARACTER = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Scripts without white space between words; each character counts as one."""
_WORD = re.compile(rf"[{_CHARACTER}]|[^\W{_CHARACTER}]+(?:'[^\W{_CHARACTER}]+)*")
_MOST_WORDS = 1 << 20
"""Distinct words that are told apart; all later ones count as one."""
_RAREST = 5
"""Pairs that a word, or an opening, must tell apart to be a column."""
_OPENING = 3


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower().replace("’", "'"))


@dataclass(eq=False)
class Vocabulary:
    """Numbers of words, in the order in which they were seen first."""

    numbers: dict[str, int] = field(default_factory=dict)

    def encode(self, words: Sequence[str]) -> list[int]:
        """The number of each word."""
        numbers = self.numbers
        if len(numbers) > _MOST_WORDS:
            return [numbers.get(word, _MOST_WORDS) for word in words]
        return [numbers.setdefault(word, len(numbers)) for word in words]


@dataclass(frozen=True, eq=False)
class WordTable:
    """The words of n pairs.

    Attributes:
        words: The words by number.
        ids: (m,) number of each word, completion by completion: chosen, rejected, chosen, ...
        lengths: (2n,) words of each completion.
        bag: (n, columns) 1 where only the chosen completion has a word, −1 where only the rejected one has.
        bag_words: The word of each of its columns.
        openings: (n, columns) the same of the first word, the first two and the first three.
    """

    words: list[str]
    ids: np.ndarray
    lengths: np.ndarray
    bag: SparseRows
    bag_words: list[str]
    openings: SparseRows


def word_table(batches: Iterable[Sequence[tuple[str, str]]], *, most_words: int = 40_000_000) -> WordTable:
    """Read the words of the completions of pairs.

    Args:
        batches: the chosen and the rejected completion of each pair, some pairs at a time; read once.
        most_words: words after which no further pair is read, which bounds memory to about 400 MB.
    """
    vocabulary, first = Vocabulary(), Vocabulary()
    ids: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    bags, openings = _Differences(), _Differences()
    for batch in batches:
        found = [words_of(text) for pair in batch for text in pair]
        ids.append(_numbers(vocabulary, found))
        lengths.append(np.array([len(words) for words in found], dtype=np.int64))
        bags.add(ids[-1], lengths[-1])
        keys = [opening_keys(words) for words in found]
        openings.add(_numbers(first, keys), np.array([len(each) for each in keys], dtype=np.int64))
        if sum(map(len, ids)) >= most_words:
            break
    words = list(vocabulary.numbers)
    bag, columns = bags.rows_of()
    return WordTable(
        words,
        np.concatenate([np.zeros(0, np.int32), *ids]),
        np.concatenate([np.zeros(0, np.int64), *lengths]),
        bag,
        [words[i] if i < len(words) else "" for i in columns.tolist()],
        openings.rows_of()[0],
    )


def opening_keys(words: Sequence[str]) -> list[str]:
    """The first word, the first two and the first three of a completion, as far as it has them."""
    return [" ".join(words[:n]) for n in range(1, min(_OPENING, len(words)) + 1)]


def _numbers(vocabulary: Vocabulary, found: Sequence[Sequence[str]]) -> np.ndarray:
    return np.array(vocabulary.encode([word for words in found for word in words]), dtype=np.int32)


class _Differences:
    """What only one completion of a pair has, collected some pairs at a time."""

    def __init__(self) -> None:
        self.pairs = 0
        self.rows: list[np.ndarray] = []
        self.ids: list[np.ndarray] = []
        self.signs: list[np.ndarray] = []

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Add pairs, by the words of their completions and how many each has."""
        completion = np.repeat(np.arange(len(lengths)), lengths)
        keys = (completion // 2) * (_MOST_WORDS + 1) + ids
        # A completion counts a word once; where both have it, it says nothing.
        parts = [np.unique(keys[completion % 2 == side]) for side in (0, 1)]
        keys, first, counts = np.unique(np.concatenate(parts), return_index=True, return_counts=True)
        alone = counts == 1
        rows, columns = np.divmod(keys[alone], _MOST_WORDS + 1)
        self.rows.append((rows + self.pairs).astype(np.int32))
        self.ids.append(columns.astype(np.int32))
        self.signs.append(np.where(first[alone] < len(parts[0]), 1, -1).astype(np.int8))
        self.pairs += len(lengths) // 2

    def rows_of(self) -> tuple[SparseRows, np.ndarray]:
        """Rows of ±1 with a column for what is in pairs enough, and the number that each stands for."""
        ids = np.concatenate([np.zeros(0, np.int32), *self.ids])
        counts = np.bincount(ids, minlength=1)
        frequent = np.flatnonzero(counts >= _RAREST)
        numbers = np.full(len(counts), -1, dtype=np.int32)
        numbers[frequent] = np.arange(len(frequent))
        kept = numbers[ids] >= 0
        rows, signs = (
            np.concatenate([np.zeros(0, np.int32), *each])[kept] for each in (self.rows, self.signs)
        )
        entries = SparseRows(rows, numbers[ids[kept]], signs.astype(np.float32), (self.pairs, len(frequent)))
        return entries, frequent
