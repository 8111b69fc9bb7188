"""The right answers of all rows, looked at before the first step by the rewards that will read them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlhf_algos.jobs.config import OnlineJobConfig
from rlhf_data import UserError, data_files, record_rows, row_place, scan_rows
from rlhf_infer import RewardFunctionFactory
from rlhf_infer.rewards.answers.verifiable import is_checked

_RULES = ("number", "math", "choice", "exact")
"""Rules that read a column of right answers; they are cheap to make."""


_UNCHECKED = (
    "to check a completion with, and no other reward; add one, give another reward beside it, or leave such "
    "rows out"
)


class AnswerCheck:
    """Looks whether the rewards of a job can read the right answers of rows.

    With `on_bad_row` "skip" a row that cannot be read is left out.
    """

    def __init__(self, config: OnlineJobConfig) -> None:
        specs = [spec for spec in config.reward if spec.partition(":")[0] in _RULES]
        self._config = config
        self._rules: list[Any] = [RewardFunctionFactory.from_spec(spec) for spec in specs]
        self._alone = bool(specs) and len(specs) == len(config.reward)

    def file(self, path: str, *, subset_size: int | None = None) -> list[str]:
        """Messages about the rows of a file whose answers cannot be used; other bad rows are passed over.

        At most `subset_size` rows are checked.

        Raises:
            UserError: no row has a column that a reward needs; with `on_bad_row` "error" also a row whose
                answer cannot be read or that no reward applies to. File and row are named.
        """
        if not self._rules:
            return []
        seen: set[str] = set()
        wrong: list[str] = []
        unanswered: list[str] = []
        where = None
        for where, row in _rows(self._config, path, subset_size):
            seen |= row.keys()
            try:
                self._read(row, where)
            except UserError as error:
                if self._config.on_bad_row == "error":
                    raise
                wrong.append(str(error))
            else:
                if self._lacks_answer(row, where):
                    unanswered.append(where)
        if where is None:  # reading the rows says what is wrong with them
            return []
        self._check_columns(path, seen)
        columns = " or ".join(rule.column for rule in self._rules)
        wrong += [f"{row}: there is no {columns} {_UNCHECKED}" for row in unanswered]
        if wrong and self._config.on_bad_row == "error":
            raise UserError(wrong[0], code="missing_answer")
        return wrong

    def accepts(self, record: Any) -> bool:
        """Whether a record's row is none that `file` names."""
        row = getattr(record, "columns", {})
        try:
            self._read(row, "")
            return not self._lacks_answer(row, "")
        except UserError:
            return False

    def columns(self, path: str, records: Iterable[Any]) -> None:
        """Refuse a file whose first records lack a column that a reward needs."""
        seen = {column for record in records for column in getattr(record, "columns", {})}
        if self._rules:
            self._check_columns(path, seen)

    def record(self, record: Any) -> None:
        """Refuse a record whose right answer no reward can read."""
        row = getattr(record, "columns", {})
        self._read(row, record.where)
        if self._lacks_answer(row, record.where):
            columns = " or ".join(rule.column for rule in self._rules)
            raise UserError(f"{record.where}: there is no {columns} {_UNCHECKED}", code="missing_answer")

    def _check_columns(self, path: str, seen: set[str]) -> None:
        """Refuse a file none of whose rows has a column that a reward needs."""
        for rule in self._rules:
            if missing := [column for column in rule.required_columns if column not in seen]:
                raise UserError(
                    f"{path}: reward {rule.name} needs a column {missing[0]}; there are "
                    f"{', '.join(sorted(seen)) or 'none beside prompt'}: name another one with "
                    f"{rule.name}:column=NAME, or add it",
                    code="missing_column",
                    column=missing[0],
                )

    def _read(self, row: Mapping[str, Any], where: str) -> None:
        """Refuse a right answer that a reward cannot read."""
        for rule in self._rules:
            if rule.column in row:
                rule.check_row(row, where)
            is_checked(row, rule.column, where)

    def _lacks_answer(self, row: Mapping[str, Any], where: str) -> bool:
        """Whether no reward applies to a row."""
        return self._alone and not any(is_checked(row, rule.column, where) for rule in self._rules)


def _rows(
    config: OnlineJobConfig, path: str, subset_size: int | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place and columns of each row, bad ones left out."""
    files = itertools.chain.from_iterable(_rows_of_file(config, file) for file in data_files(path))
    return itertools.islice(files, subset_size)


def _rows_of_file(config: OnlineJobConfig, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows, numbers = itertools.tee(scan_rows(path))
    found = zip(numbers, record_rows(rows, path, "prompt", columns=config.columns), strict=True)
    for (number, _), records in found:
        if not isinstance(records, UserError):
            yield row_place(path, number), getattr(records[0], "columns", {})
