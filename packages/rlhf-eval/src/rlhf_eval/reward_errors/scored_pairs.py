"""Preference pairs with the scores of a reward model, or of every member of an ensemble."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

_REFUSAL = re.compile(
    r"\b(i\s*(can(no|')t|am (not able|unable)|'m (not able|unable|sorry)|won't|will not)"
    r"|i do not feel comfortable|i'm not going to|i (must|have to) decline|as an ai\b"
    r"|i apologi[sz]e,? but|sorry,? (but )?i)",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"^\s*(#{1,6} |[-*•] |\d+[.)] |```)|\*\*[^*\n]+\*\*", re.MULTILINE)
_REFUSAL_HEAD = 300
"""Characters from the start of a completion in which a refusal is looked for."""


@dataclass(frozen=True)
class ScoredPairs:
    """n pairs of completions, the first of each preferred by people, and what K models score them.

    Attributes:
        prompts: n prompts as text.
        chosen: n preferred completions as text.
        rejected: n other completions as text.
        chosen_scores: (K, n) scores of the preferred ones; K is 1 without an ensemble.
        rejected_scores: (K, n) scores of the others.
        groups: further columns of the rows, by name: n values of each, such as the source of a row.
    """

    prompts: Sequence[str]
    chosen: Sequence[str]
    rejected: Sequence[str]
    chosen_scores: np.ndarray
    rejected_scores: np.ndarray
    groups: dict[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def member_margins(self) -> np.ndarray:
        """(K, n) score of the preferred completion minus that of the other, of each member."""
        return np.asarray(self.chosen_scores, dtype=float) - np.asarray(self.rejected_scores, dtype=float)

    @cached_property
    def margins(self) -> np.ndarray:
        """(n,) mean margin of the members."""
        return self.member_margins.mean(0)

    @cached_property
    def correct(self) -> np.ndarray:
        """(n,) 1 where the preferred completion has the higher score, 0 where the other has, ½ for a tie."""
        return (np.sign(self.margins) + 1) / 2

    @cached_property
    def confidence(self) -> np.ndarray:
        """(n,) probability that the Bradley-Terry model gives the completion it prefers, in [½, 1]."""
        return probability(np.abs(self.margins))

    @cached_property
    def disagreement(self) -> np.ndarray:
        """(n,) standard deviation of the members' margins."""
        return self.member_margins.std(0)

    @cached_property
    def length_difference(self) -> np.ndarray:
        """(n,) characters by which the preferred completion is longer."""
        return np.array(
            [len(a) - len(b) for a, b in zip(self.chosen, self.rejected, strict=True)], dtype=float
        )


def probability(margins: np.ndarray) -> np.ndarray:
    """P(first is better) = 1 / (1 + exp(-margin)) (Bradley & Terry 1952, with strengths exp(score))."""
    return 0.5 * (1 + np.tanh(np.asarray(margins, dtype=float) / 2))


def is_refusal(completion: str) -> bool:
    """Whether a completion begins like a refusal; by its wording alone, so a hint and not a verdict."""
    return _REFUSAL.search(completion[:_REFUSAL_HEAD].replace("’", "'")) is not None


def has_markup(completion: str) -> bool:
    """Whether a completion has lists, headings, bold words or code."""
    return _MARKUP.search(completion) is not None
