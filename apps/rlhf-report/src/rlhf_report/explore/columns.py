"""Columns of the rows beside their pair: those to group by, and those that are left unread."""

from __future__ import annotations

import difflib
import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_data import UserError
from rlhf_eval.exploration import PairTexts, SubsetColumn

_NONE = "(none)"
_MOST_NAMES = 1000


class RowColumns:
    """Collects columns of the rows, one row at a time."""

    def __init__(self, by: Sequence[str]) -> None:
        self.unread: Counter[str] = Counter()
        self._names: set[str] = set()
        self._values: dict[str, dict[str, int]] = {name: {} for name in by}
        self._codes = {name: array("i") for name in by}

    def add(self, row: Mapping[str, Any], pair: PairTexts) -> None:
        """Add a row and what was read of it."""
        if len(self._names) < _MOST_NAMES:
            self._names.update(row)
        for name, values in self._values.items():
            self._codes[name].append(values.setdefault(_text(row.get(name)), len(values)))
        self.unread.update(_unread(row, pair))

    def subsets(self, pairs: int) -> list[SubsetColumn]:
        """The columns, as far as the first pairs."""
        found = []
        for name, values in self._values.items():
            if not set(values) - {_NONE}:
                raise self._missing(name)
            codes = np.array(self._codes[name], dtype=np.int64)[:pairs]
            found.append(SubsetColumn(name, list(values), codes))
        return found

    def _missing(self, name: str) -> UserError:
        by_name = {each.lower(): each for each in sorted(self._names)}
        outer = name.partition(".")[0].lower()
        near = [outer] if outer in by_name else difflib.get_close_matches(name.lower(), by_name, n=1)
        nearest = by_name[near[0]] if near else None
        hint = f"; perhaps {nearest} is meant" if nearest else ""
        present = ", ".join(by_name.values()) or "none"
        return UserError(
            f"--by {name or repr(name)}: no row has a value in such a column{hint}; there are {present}",
            code="missing_column",
            column=name,
            nearest=nearest,
        )


def _text(value: Any) -> str:
    """The name of a value; what is missing or empty has one too."""
    if value is None or value == [] or value == {}:
        return _NONE
    if isinstance(value, bool | int | float | list | dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text.encode(errors="replace").decode().strip() or _NONE


def _unread(row: Mapping[str, Any], pair: PairTexts) -> list[str]:
    """Columns that change what a pair means, and that are not read."""
    found = []
    system = row.get("system")
    if isinstance(system, str) and system.strip() and system.strip() not in pair.prompt:
        found.append("system")
    if isinstance(row.get("turn"), int) and "conversation_a" in row:
        found.append("turn")
    if isinstance(row.get("weight"), int | float) and row["weight"] != 1:
        found.append("weight")
    return found
