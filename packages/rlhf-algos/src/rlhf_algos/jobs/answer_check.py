"""The right answers of all rows, looked at before the first step by the rewards that will read them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_data import UserError, record_rows, row_place, scan_rows
from rlhf_infer import RewardFunctionFactory
from rlhf_infer.rewards.answers.verifiable import is_checked

__all__ = ["check_answers"]

_RULES = ("number", "math", "choice", "exact")
"""Rules that read a column of right answers; they are cheap to make."""


def check_answers(config: Any, path: str, *, subset_size: int | None = None) -> None:
    """Refuse a file with a right answer that a reward of the job cannot read, or without any.

    Only the rules for checked answers look at rows; rows that are bad otherwise are passed over.

    Args:
        config: the job's settings.
        path: the file.
        subset_size: rows that are looked at; None for all.

    Raises:
        UserError: a row's answer cannot be read, no reward applies to a row, or no row has a column that a
            reward needs; file and row are named.
    """
    rules: list[Any] = [
        RewardFunctionFactory.from_spec(spec) for spec in config.reward if spec.partition(":")[0] in _RULES
    ]
    if not rules:
        return
    alone = len(rules) == len(config.reward)
    seen: set[str] = set()
    unanswered: str | None = None
    where = None
    for where, row in _rows(config, path, subset_size):
        seen |= row.keys()
        for rule in rules:
            if rule.column in row:
                rule.check_row(row, where)
        if not any(is_checked(row, rule.column, where) for rule in rules):
            unanswered = unanswered or where
    if where is None:  # reading the rows says what is wrong with them
        return
    for rule in rules:
        if missing := [column for column in rule.required_columns if column not in seen]:
            raise UserError(
                f"{path}: reward {rule.name} needs a column {missing[0]}; there are "
                f"{', '.join(sorted(seen)) or 'none beside prompt'}: name another one with "
                f"{rule.name}:column=NAME, or add it"
            )
    if alone and unanswered:
        columns = " or ".join(rule.column for rule in rules)
        raise UserError(
            f"{unanswered}: there is no {columns} to check a completion with, and no other reward; add one, "
            "give another reward beside it, or leave such rows out"
        )


def _rows(config: Any, path: str, subset_size: int | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place and columns of each row, bad ones left out."""
    rows, numbers = itertools.tee(scan_rows(path))
    found = zip(numbers, record_rows(rows, path, "prompt", columns=config.columns), strict=True)
    good = (
        (row_place(path, number), getattr(records[0], "columns", {}))
        for (number, _), records in found
        if not isinstance(records, UserError)
    )
    return itertools.islice(good, subset_size)
