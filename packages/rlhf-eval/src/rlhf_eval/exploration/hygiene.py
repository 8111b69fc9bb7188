"""Rows that should not be there: duplicates, contradictions, empty completions, prompts in several sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlhf_eval.exploration.pair_table import NEAR_TIE, PairTable
from rlhf_eval.exploration.surface import SCRIPTS


@dataclass(frozen=True)
class RowRule:
    """A rule that rows can break.

    Attributes:
        severity: error: the row teaches nothing or the wrong thing; warning: look at it; info: for
            information.
        text: What is wrong with a row that breaks it.
    """

    severity: str
    text: str


ROW_RULES: Mapping[str, RowRule] = {
    "empty_completion": RowRule("error", "a completion is empty"),
    "identical_pair": RowRule("error", "both completions are the same"),
    "contradiction": RowRule("error", "another row has this pair with the labels swapped"),
    "duplicate_row": RowRule("warning", "a row before it is the same"),
    "near_identical_pair": RowRule("warning", "both completions are nearly the same"),
    "near_duplicate_row": RowRule("warning", "a row before it is nearly the same"),
    "prompt_in_another_set": RowRule("warning", "its prompt is also in another data set"),
    "near_prompt_in_another_set": RowRule("warning", "nearly its prompt is also in another data set"),
    "strange_characters": RowRule("warning", "characters that do not print, or traces of a wrong encoding"),
    "scripts_differ": RowRule("warning", "the completions are written in different scripts"),
    "ends_with_human": RowRule("warning", "a dialogue ends with a turn of the user"),
    "parts_early": RowRule("info", "the dialogues part before the last turn of the assistant"),
    "duplicate_prompt": RowRule("info", "a row before it has the same prompt"),
    "near_duplicate_prompt": RowRule("info", "a row before it has nearly the same prompt"),
}
"""Rules of `find_rows`, the worst first."""


def find_rows(
    table: PairTable, near_prompts: np.ndarray, near_rows: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The rows that break each of `ROW_RULES`, and for each the row that it is compared with.

    Duplicates are looked for in lower case with single spaces. A row that is the same as an earlier one is
    no near duplicate of it, and one that contradicts another is neither.

    Args:
        table: n pairs.
        near_prompts: (n,) number of the first pair with nearly the same prompt.
        near_rows: (n,) number of the first pair with nearly the same prompt and completions, in either order.

    Returns:
        For each rule, numbers of pairs, and of the other pair (−1 if there is none).
    """
    everything = np.arange(len(table))
    same_prompt, same_row = _first_of(table.keys[:, 0]), _first_of(table.keys[:, 3])
    other = _lookup(table.keys[:, 3], table.swapped)
    identical = table.keys[:, 1] == table.keys[:, 2]
    contradicts = (other >= 0) & ~identical
    lengths = table.count("characters")
    nearly = (near_rows < everything) & (same_row == everything) & ~contradicts
    elsewhere, near_elsewhere = _in_another_set(table, same_prompt), _in_another_set(table, near_prompts)
    both_scripts = (table.script > 0).all(axis=1)
    none = np.full(len(table), -1)
    found = {
        "empty_completion": (lengths.min(axis=1, initial=1) == 0, none),
        "identical_pair": (identical, none),
        "contradiction": (contradicts, other),
        "duplicate_row": (same_row < everything, same_row),
        "near_identical_pair": ((table.similarity >= NEAR_TIE) & ~identical, none),
        "near_duplicate_row": (nearly, near_rows),
        "prompt_in_another_set": (elsewhere >= 0, elsewhere),
        "near_prompt_in_another_set": ((near_elsewhere >= 0) & (elsewhere < 0), near_elsewhere),
        "strange_characters": (table.strange > 0, none),
        "scripts_differ": (both_scripts & (table.script[:, 0] != table.script[:, 1]), none),
        "ends_with_human": (table.flags[:, 0], none),
        "parts_early": (table.flags[:, 1], none),
        "duplicate_prompt": (same_prompt < everything, same_prompt),
        "near_duplicate_prompt": (
            (near_prompts < everything) & (same_prompt == everything),
            near_prompts,
        ),
    }
    return {rule: (np.flatnonzero(flags), others[flags]) for rule, (flags, others) in found.items()}


def leaks(table: PairTable, near_prompts: np.ndarray) -> list[dict[str, int]]:
    """For every two data sets: rows of one whose prompt, near prompt or whole row is in the other too."""
    found = []
    sets = range(int(table.source.max(initial=0)) + 1)
    for first in sets:
        for second in (other for other in sets if other != first):
            a, b = table.source == first, table.source == second
            found.append(
                {
                    "set": second,
                    "also_in": first,
                    "rows": int(b.sum()),
                    "prompts": int(np.isin(table.keys[b, 0], table.keys[a, 0]).sum()),
                    "near_prompts": int(np.isin(near_prompts[b], near_prompts[a]).sum()),
                    "whole_rows": int(np.isin(table.keys[b, 3], table.keys[a, 3]).sum()),
                }
            )
    return found


def scripts_of(table: PairTable) -> dict[str, dict[str, int]]:
    """Completions of both sides by the script that most of their letters belong to."""
    return {
        name: {"chosen": int(chosen), "rejected": int(rejected)}
        for name, chosen, rejected in zip(
            SCRIPTS,
            *(np.bincount(table.script[:, side], minlength=len(SCRIPTS)) for side in (0, 1)),
            strict=True,
        )
        if chosen or rejected
    }


def _first_of(keys: np.ndarray) -> np.ndarray:
    """(n,) number of the first row with the same key."""
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return first[which]


def _lookup(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(n,) number of the first row that has the wanted key; −1 where none has."""
    names, first = np.unique(keys, return_index=True)
    at = np.minimum(np.searchsorted(names, wanted), max(len(names) - 1, 0))
    return np.where(names[at] == wanted, first[at], -1) if len(names) else np.zeros(0, dtype=np.int64)


def _in_another_set(table: PairTable, groups: np.ndarray) -> np.ndarray:
    """(n,) number of the first row of another data set that is in the same group; −1 if there is none."""
    found = np.full(len(table), -1)
    names, group = np.unique(groups, return_inverse=True)
    for number in range(int(table.source.max(initial=0)) + 1):
        rows = np.flatnonzero(table.source == number)
        first = np.full(len(names), -1)
        first[group[rows[::-1]]] = rows[::-1]
        others = (table.source != number) & (found < 0)
        found[others] = first[group[others]]
    return found
