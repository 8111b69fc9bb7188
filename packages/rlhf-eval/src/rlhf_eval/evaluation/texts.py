"""Measures of completions' texts: diversity, repetition, refusals."""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence

_FIRST_WORDS = 64
"""Words of a completion that count, so that a model does not seem less diverse for writing more."""
_OPENING = 200
"""Characters in which a refusal is looked for; later ones are mostly about something else."""
_REFUSAL = re.compile(
    r"\b(i can(?:no|['’])t|i cannot|i['’]m sorry|i am sorry|sorry,|i['’]m not (?:able|going|comfortable)"
    r"|i am not (?:able|going)|i won['’]t|i will not|i['’]m afraid|unable to|i must decline)\b",
    re.IGNORECASE,
)


def distinct_share(texts: Sequence[str], n: int) -> float:
    """Distinct-n: different n-grams of words over all n-grams, of the first 64 words of each text.

    Li et al. 2016, "A diversity-promoting objective function", https://arxiv.org/abs/1510.03055, section 5.
    It falls with the number of texts, so compare only equal numbers of texts.

    Returns:
        In (0, 1]; NaN where no text has n words.
    """
    grams = [gram for each in texts for gram in word_grams(each.split()[:_FIRST_WORDS], n)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def repeated_share(text: str, n: int = 4) -> float:
    """The share of a text's n-grams of words that repeat an earlier one: 1 − distinct / all.

    seq-rep-n of Welleck et al. 2020, "Neural text generation with unlikelihood training",
    https://arxiv.org/abs/1908.04319, equation 10.

    Returns:
        In [0, 1); 0 for texts of fewer than n words.
    """
    grams = word_grams(text.split(), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def compression_ratio(texts: Sequence[str]) -> float:
    """Bytes of all texts over their bytes under gzip: higher where they repeat themselves and each other.

    Shaib et al. 2024, "Standardizing the measurement of text diversity", https://arxiv.org/abs/2403.00553,
    which finds that it says as much as slower measures; like these it rises with the amount of text.

    Returns:
        NaN without any text.
    """
    raw = "\n".join(texts).encode("utf-8", "backslashreplace")
    return len(raw) / len(gzip.compress(raw, mtime=0)) if raw else float("nan")


def is_refusal(text: str) -> bool:
    """Whether the first 200 characters say, in English, that the writer will not or cannot help."""
    return bool(_REFUSAL.search(text[:_OPENING]))


def word_grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """The n-grams of words, in their order."""
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
