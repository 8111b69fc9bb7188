"""Table of features of every pair: columns of numbers, one for each pair, whatever its texts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rlhf_eval.exploration.pair_texts import PairTexts
from rlhf_eval.exploration.surface import COUNTS, script_of, strange_characters, surface_counts

NEAR_TIE = 0.95
"""Similarity from which two completions count as nearly identical."""


@dataclass(frozen=True, eq=False)
class PairTable:
    """n pairs as columns.

    Attributes:
        source: (n,) which of the data sets a pair is from, from 0.
        file: (n,) which of their files.
        line: (n,) its line or row there, from 1.
        human_turns: (n,) turns of the user.
        prompt_size: (n, 2) characters and words of the prompt.
        counts: (n, 2, len(COUNTS)) surface counts, of the chosen and of the rejected completion.
        tokens: (n, 3) tokens of prompt, chosen and rejected completion; −1 without a tokenizer.
        similarity: (n,) of both completions, 1 where they are the same, 0 where lengths tell them apart.
        strange: (n,) characters that do not print, or traces of a wrong encoding.
        script: (n, 2) index in SCRIPTS of both completions.
        flags: (n, 2) whether a dialogue ends with the user; whether they part before the last turn.
        keys: (n, 4) hashes of the prompt, of the chosen and the rejected completion, and of the whole row.
        swapped: (n,) hash of the whole row with its completions in the other order.
    """

    source: np.ndarray
    file: np.ndarray
    line: np.ndarray
    human_turns: np.ndarray
    prompt_size: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    similarity: np.ndarray
    strange: np.ndarray
    script: np.ndarray
    flags: np.ndarray
    keys: np.ndarray
    swapped: np.ndarray

    def __len__(self) -> int:
        return len(self.line)

    def count(self, name: str) -> np.ndarray:
        """(n, 2) one of `COUNTS`, of the chosen and the rejected completion."""
        return self.counts[:, :, COUNTS.index(name)]

    @staticmethod
    def joined(parts: Sequence[PairTable]) -> PairTable:
        """The pairs of all parts, in their order."""
        names = [field.name for field in fields(PairTable)]
        return PairTable(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def columns_of_pairs(
    pairs: Sequence[PairTexts], places: Iterable[tuple[int, int, int]], tokens: Sequence[Sequence[int]] | None
) -> PairTable:
    """The columns of some pairs.

    Args:
        pairs: n pairs.
        places: number of the data set, of the file, and line, of each.
        tokens: tokens of prompt, chosen and rejected completion of each; None without a tokenizer.
    """
    source, file, line = np.array(list(places), dtype=np.int64).reshape(-1, 3).T
    hashes = np.array([_hashes(pair) for pair in pairs], dtype=np.uint64).reshape(-1, 5)
    counted = [(surface_counts(pair.chosen), surface_counts(pair.rejected)) for pair in pairs]
    return PairTable(
        source=source.astype(np.int16),
        file=file.astype(np.int32),
        line=line,
        human_turns=_array(np.int16, (pair.human_turns for pair in pairs)),
        prompt_size=_array(np.float32, ((len(p.prompt), len(p.prompt.split())) for p in pairs)).reshape(
            -1, 2
        ),
        counts=np.array(counted, dtype=np.float32).reshape(-1, 2, len(COUNTS)),
        tokens=np.array(tokens or [(-1, -1, -1)] * len(pairs), dtype=np.int32).reshape(-1, 3),
        similarity=_array(np.float32, (_similarity(pair.chosen, pair.rejected) for pair in pairs)),
        strange=_array(
            np.int32,
            (sum(map(strange_characters, (pair.prompt, pair.chosen, pair.rejected))) for pair in pairs),
        ),
        script=_array(np.int8, ((script_of(p.chosen), script_of(p.rejected)) for p in pairs)).reshape(-1, 2),
        flags=_array(np.bool_, ((p.ends_with_human, p.parts_early) for p in pairs)).reshape(-1, 2),
        keys=hashes[:, :4],
        swapped=hashes[:, 4],
    )


def folded(text: str) -> str:
    """The text in lower case with single spaces, in which duplicates are looked for."""
    return " ".join(text.lower().split())


def _array(dtype: Any, values: Iterable[Any]) -> np.ndarray:
    return np.array(list(values), dtype=dtype)


def _hashes(pair: PairTexts) -> tuple[int, ...]:
    prompt, chosen, rejected = (_hash(folded(each)) for each in (pair.prompt, pair.chosen, pair.rejected))
    row, swapped = _hash(f"{prompt} {chosen} {rejected}"), _hash(f"{prompt} {rejected} {chosen}")
    return prompt, chosen, rejected, row, swapped


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())


def _similarity(chosen: str, rejected: str) -> float:
    """Dice's coefficient of the multisets of word trigrams, 2 |A ∩ B| / (|A| + |B|)."""
    a, b = folded(chosen).split(), folded(rejected).split()
    if a == b:
        return 1.0
    first, second = _trigrams(a), _trigrams(b)
    total = len(first) + len(second)
    if 2 * min(len(first), len(second)) < NEAR_TIE * total:
        return 0.0  # they cannot be near enough
    return 2 * (Counter(first) & Counter(second)).total() / total


def _trigrams(words: list[str]) -> list[tuple[str, ...]]:
    return list(zip(words, words[1:], words[2:], strict=False)) if len(words) > 2 else [tuple(words)]
