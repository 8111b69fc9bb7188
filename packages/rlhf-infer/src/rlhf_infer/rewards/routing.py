"""Routing by the column `verifiable`: checkable answers to rules, the others to reward models and judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from rlhf_data import invalid_value
from rlhf_infer.rewards.conventions import Caller, Samples, then

COLUMN = "verifiable"
_YES, _NO = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")
"""Meaning of the column's values, as lower-case text."""


def can_be_checked(flag: Any) -> bool:
    """Whether the answer of a row can be checked, by its value of the column.

    The flag is true or false, yes or no, 1 or 0, also as text in any case; None, NaN or an empty text (CSV's
    null) where the row does not say, and then it can.
    """
    said = str(flag).strip().lower()
    if said in _NO:
        return False
    if said in _YES or not said or flag is None or (isinstance(flag, Real) and said == "nan"):
        return True
    raise invalid_value(
        f"column {COLUMN} is {flag!r}; expected true or false, yes or no, 1 or 0, or null", COLUMN
    )


def open_answers_only(call: Caller, rows: Sequence[str]) -> Caller:
    """Let a function see only samples whose answer cannot be checked, by the column `verifiable`.

    The rewards of the others are None; without the column it sees all. A checker next to it gives None for
    the samples that this function sees.

    Args:
        call: the function.
        rows: keys of what it returns, if that is a mapping; else empty.
    """

    def routed(samples: Samples) -> Any:
        flags = samples.columns.get(COLUMN)
        if flags is None:
            return call(samples)
        seen = [i for i, flag in enumerate(flags) if not can_be_checked(flag)]
        if not seen:
            return _spread({row: [] for row in rows} or [], seen, len(flags))
        return then(call(samples.part(seen)), lambda result: _spread(result, seen, len(flags)))

    return routed


def _spread(result: Any, seen: Sequence[int], count: int) -> Any:
    """Rewards of all `count` samples, None for those not seen; a malformed result is returned unchanged."""
    if isinstance(result, Mapping):
        return {row: _spread(values, seen, count) for row, values in result.items()}
    if not hasattr(result, "__len__") or len(result) != len(seen):
        return result
    rewards: list[Any] = [None] * count
    for i, reward in zip(seen, result, strict=True):
        rewards[i] = reward
    return rewards
