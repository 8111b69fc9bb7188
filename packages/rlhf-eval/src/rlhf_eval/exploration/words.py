"""Words of completions as numbers: what bags of words, first words and phrases are counted from."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count

import numpy as np

from rlhf_eval.exploration.logistic import SparseRows

_CHARACTER = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Scripts without white space between words; each character counts as one."""
_WORD = re.compile(rf"[{_CHARACTER}]|[^\W{_CHARACTER}]+(?:'[^\W{_CHARACTER}]+)*")
_ASCII_WORD = re.compile(r"[a-z0-9_]+(?:'[a-z0-9_]+)*")
"""The same of lower-case ASCII, in half the time."""
_MOST_WORDS = 1 << 20
"""Distinct words that are kept apart; all later ones count as one."""
_RAREST = 5
"""Pairs that a word, or an opening, must tell apart to be a column."""
_OPENING = 3


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    lower = text.lower().replace("’", "'")
    return (_ASCII_WORD if lower.isascii() else _WORD).findall(lower)


@dataclass(frozen=True, eq=False)
class Encoded:
    """Texts of completions as numbers that hold within them.

    Attributes:
        names: The distinct texts, in the order in which they come first.
        ids: (m,) number of each text in `names`, completion by completion: chosen, rejected, chosen, ...
        lengths: (2n,) texts of each completion.
    """

    names: list[str]
    ids: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(completions: Sequence[Sequence[str]]) -> Encoded:
        """The texts of completions, numbered."""
        lengths = np.fromiter(map(len, completions), dtype=np.int64, count=len(completions))
        numbers: defaultdict[str, int] = defaultdict(count().__next__)
        texts = chain.from_iterable(completions)
        ids = np.fromiter(map(numbers.__getitem__, texts), dtype=np.int32, count=int(lengths.sum()))
        return Encoded(list(numbers), ids, lengths)


@dataclass(frozen=True, eq=False)
class PairWords:
    """The words of some pairs.

    Attributes:
        words: Of their completions.
        openings: The first word, the first two and the first three of each completion, as far as it has them.
    """

    words: Encoded
    openings: Encoded


def words_of_pairs(pairs: Iterable[tuple[str, str]]) -> PairWords:
    """The words of the chosen and the rejected completion of some pairs."""
    found = [words_of(text) for pair in pairs for text in pair]
    openings = [[" ".join(words[:n]) for n in range(1, min(_OPENING, len(words)) + 1)] for words in found]
    return PairWords(Encoded.of(found), Encoded.of(openings))


@dataclass(frozen=True, eq=False)
class WordTable:
    """The words of n pairs.

    Attributes:
        words: The words by number.
        ids: (m,) number of each word, completion by completion: chosen, rejected, chosen, ...; those after
            the first million of distinct words have the number after the last one.
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


class WordCounter:
    """Collects the words of pairs, some pairs at a time and in their order, into a `WordTable`.

    Args:
        most_words: words after which no further pair is taken, which bounds memory to about 400 MB.
    """

    def __init__(self, most_words: int = 40_000_000) -> None:
        self.left = most_words
        self._words, self._openings = _Vocabulary(), _Vocabulary()
        # Arrays of Python's grow in place; joining a list of NumPy's would hold everything twice.
        self._ids, self._lengths = array("i"), array("i")
        self._bags, self._first = _Differences(), _Differences()

    @property
    def is_full(self) -> bool:
        """Whether all further pairs are left out."""
        return self.left <= 0

    def add(self, pairs: PairWords) -> None:
        """Add the next pairs, unless there are words enough."""
        if self.is_full:
            return
        ids = self._words.encode(pairs.words)
        self._ids.frombytes(ids.tobytes())
        self._lengths.frombytes(pairs.words.lengths.astype(np.int32).tobytes())
        self._bags.add(ids, pairs.words.lengths)
        self._first.add(self._openings.encode(pairs.openings), pairs.openings.lengths)
        self.left -= len(ids)

    def table(self) -> WordTable:
        """The words of all pairs that were taken."""
        words = list(self._words.numbers)
        bag, columns = self._bags.rows_of()
        return WordTable(
            words,
            np.frombuffer(self._ids, np.int32),
            np.frombuffer(self._lengths, np.int32).astype(np.int64),
            bag,
            [words[i] if i < len(words) else "" for i in columns.tolist()],
            self._first.rows_of()[0],
        )


class _Vocabulary:
    """Numbers of texts, in the order in which they were seen first."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def encode(self, found: Encoded) -> np.ndarray:
        """The number of each text; `_MOST_WORDS` for those that do not fit."""
        numbers = self.numbers
        for name in found.names:
            if len(numbers) >= _MOST_WORDS:
                break
            numbers.setdefault(name, len(numbers))
        of_names = [numbers.get(name, _MOST_WORDS) for name in found.names]
        return np.array(of_names, dtype=np.int32)[found.ids]


class _Differences:
    """Words that only one completion of a pair has, collected some pairs at a time."""

    def __init__(self) -> None:
        self.pairs = 0
        self.rows, self.ids, self.signs = array("i"), array("i"), array("b")

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Add pairs, by the words of their completions and how many each has."""
        completion = np.repeat(np.arange(len(lengths)), lengths)
        # Pair, word and side in one number: sorting it puts both sides of a word next to each other.
        keys = np.sort(((completion // 2) * (_MOST_WORDS + 1) + ids) * 2 + completion % 2)
        keys = keys[np.diff(keys, prepend=-1) > 0]  # a completion counts a word once
        words = keys // 2
        new = np.diff(words, prepend=-1, append=-1) != 0
        alone = keys[new[:-1] & new[1:]]  # where both have it, it says nothing
        rows, columns = np.divmod(alone // 2, _MOST_WORDS + 1)
        self.rows.frombytes((rows + self.pairs).astype(np.int32).tobytes())
        self.ids.frombytes(columns.astype(np.int32).tobytes())
        self.signs.frombytes((1 - 2 * (alone % 2)).astype(np.int8).tobytes())
        self.pairs += len(lengths) // 2

    def rows_of(self) -> tuple[SparseRows, np.ndarray]:
        """Rows of ±1 with a column for each word in enough pairs, and the word's number."""
        ids = np.frombuffer(self.ids, np.int32)
        counts = np.bincount(ids, minlength=1)
        frequent = np.flatnonzero(counts >= _RAREST)
        numbers = np.full(len(counts), -1, dtype=np.int32)
        numbers[frequent] = np.arange(len(frequent))
        kept = numbers[ids] >= 0
        rows, signs = np.frombuffer(self.rows, np.int32)[kept], np.frombuffer(self.signs, np.int8)[kept]
        entries = SparseRows(rows, numbers[ids[kept]], signs.astype(np.float32), (self.pairs, len(frequent)))
        return entries, frequent
