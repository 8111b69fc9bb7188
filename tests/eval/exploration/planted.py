"""Synthetic pairs of which everything is known."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np

from rlhf_eval.exploration import (
    Exploration,
    PairTable,
    PairTexts,
    WordCounter,
    WordTable,
    columns_of_pairs,
    explore_pairs,
    words_of_pairs,
)

WORDS = [f"{a}{b}{c}" for a in "bdfgklm" for b in "aeiou" for c in "nrst"]


def pair(prompt: str, chosen: str, rejected: str) -> PairTexts:
    return PairTexts(prompt, chosen, rejected, 1, False, False)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def unbiased(count: int, seed: int, *, per_prompt: int = 1) -> list[PairTexts]:
    """Pairs whose label is a coin."""
    rng = random.Random(seed)
    return [
        pair(
            f"question {seed} {i // per_prompt}",
            words(rng, rng.randint(4, 14)),
            words(rng, rng.randint(4, 14)),
        )
        for i in range(count)
    ]


def flipped(pairs: Sequence[PairTexts], rows: set[int]) -> list[PairTexts]:
    return [pair(p.prompt, p.rejected, p.chosen) if i in rows else p for i, p in enumerate(pairs)]


def columns(pairs: Sequence[PairTexts], sources: Sequence[int] | None = None) -> PairTable:
    of = sources or [0] * len(pairs)
    return columns_of_pairs(pairs, [(source, source, i + 1) for i, source in enumerate(of)], None)


def word_table(batches: Iterable[Iterable[tuple[str, str]]]) -> WordTable:
    """The words of the completions of pairs, some pairs at a time."""
    counter = WordCounter()
    for batch in batches:
        counter.add(words_of_pairs(batch))
    return counter.table()


def table_of_words(pairs: Sequence[PairTexts]) -> WordTable:
    return word_table([[(p.chosen, p.rejected) for p in pairs]])


def explored(pairs: Sequence[PairTexts], sources: Sequence[int] | None = None) -> Exploration:
    """The exploration of pairs, exact duplicates taken for the near ones."""
    table = columns(pairs, sources)
    return explore_pairs(table, table_of_words(pairs), first_of(table.keys[:, 0]), first_of(table.keys[:, 3]))


def first_of(keys: np.ndarray) -> np.ndarray:
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return first[which]


def learnable(count: int, seed: int) -> list[PairTexts]:
    """Pairs in which the chosen completion has a good word and the other a bad one, in two of three."""
    rng = random.Random(seed)
    pairs = []
    for i in range(count):
        parts = [words(rng, rng.randint(4, 10)) for _ in range(2)]
        if rng.random() < 0.95:
            parts = [
                f"{parts[0]} {rng.choice(['thanks', 'indeed'])}",
                f"{rng.choice(['damn', 'ugh'])} {parts[1]}",
            ]
        pairs.append(pair(f"question {i}", *parts))
    return pairs
