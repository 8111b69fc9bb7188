"""Which tokens fit a budget: the best by score, whole sentences first where wanted, in their own order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlhf_data import UserError

_DECIMALS = 3
"""Of scores, in nats: passes over other batches round differently, which must not decide between equals."""
LONGEST_UNIT = 64
"""Tokens of the longest sentence; longer ones, such as tables without full stops, are cut."""


def keep_best(scores: np.ndarray, budget: int, *, protected: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Positions of the `budget` tokens that are kept, ascending.

    Protected tokens come first. Then units by their mean score over unprotected tokens, of equal ones the
    later, and the last that does not fit gives its best tokens, of equal ones the earlier.

    Args:
        scores: (T,), high for what is kept.
        budget: tokens to keep, at most T.
        protected: (T,) bool, tokens that are kept in any case.
        units: (T,) number of the unit, such as the sentence, of each token, ascending from 0.
    """
    count = int(protected.sum())
    if count > budget:
        raise UserError(
            f"{count} tokens are protected but only {budget} may be kept; protect less or compress less",
            code="budget_too_small",
            protected=count,
            budget=budget,
        )
    free = ~protected
    scores = np.round(scores, _DECIMALS)
    sums = np.bincount(units, weights=np.where(free, scores, 0.0))
    means = np.round(sums / np.maximum(np.bincount(units, weights=free), 1), _DECIMALS)
    rank = np.empty(len(means), dtype=np.int64)
    rank[np.lexsort((-np.arange(len(means)), -means))] = np.arange(len(means))
    order = np.lexsort((np.arange(len(scores)), -scores, rank[units], ~protected))
    return np.sort(order[:budget])


def protection(
    length: int, spans: Iterable[tuple[int, int]], *, keep_first: int, keep_last: int
) -> np.ndarray:
    """(T,) bool: the first and last tokens of a text, and those of spans [start, stop)."""
    protected = np.zeros(length, dtype=bool)
    protected[:keep_first] = True
    protected[max(0, length - keep_last) :] = True
    for start, stop in spans:
        if not 0 <= start <= stop <= length:
            raise UserError(
                f"the protected span [{start}, {stop}) lies outside the text's {length} tokens",
                code="invalid_span",
                start=start,
                stop=stop,
                length=length,
            )
        protected[start:stop] = True
    return protected


def sentence_numbers(tokenizer: Any, ids: Sequence[int]) -> np.ndarray:
    """(T,) number of the sentence of each token.

    A sentence ends with a token that ends in a full stop, question or exclamation mark before a space, or
    with a line, and after `LONGEST_UNIT` tokens.
    """
    distinct, at = np.unique(np.asarray(ids), return_inverse=True)
    words = tokenizer.convert_ids_to_tokens(distinct.tolist())
    stops = np.array([word.rstrip("\"')]").endswith((".", "!", "?")) for word in words])[at]
    lines = np.array(["\n" in word or "Ċ" in word for word in words])[at]
    spaces = np.array([word.startswith((" ", "Ġ", "▁", "\n", "Ċ")) for word in words])[at]
    ends = lines[:-1] | (stops[:-1] & spaces[1:])
    starts = np.concatenate([[0], np.flatnonzero(ends) + 1])
    since = np.arange(len(ids)) - np.repeat(starts, np.diff([*starts, len(ids)]))
    return np.cumsum((since % LONGEST_UNIT) == 0) - 1
