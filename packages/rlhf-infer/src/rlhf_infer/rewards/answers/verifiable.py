r"""Rewards for answers that can be checked: numbers, choices, exact texts.

Where in a completion the answer stands: see `rlhf_infer.rewards.answers.read_answers`. Every rule says with
`required_columns` which columns it needs, and checks a row of the data with `check_row`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rlhf_data import QARecord, Text, UserError, qa_from_row
from rlhf_infer.rewards.answers.numbers import Number
from rlhf_infer.rewards.answers.read_answers import (
    Read,
    answer_part,
    gold_number,
    normal_form,
    read_choice,
    read_number,
)
from rlhf_infer.rewards.routing import COLUMN, can_be_checked
from rlhf_infer.rewards.texts import sample_name, text_of

_SHOWN = 80
"""Characters of a wrong answer that messages show."""


@dataclass(frozen=True)
class NumberReward:
    r"""1 where the completion's number equals the right one, else 0, also where there is no number.

    The completion's number is all that a box holds, but for a unit or `x =`; the first one after `####`,
    "answer is" or in a tag, behind the last `=` of that line unless a working follows it (`20 = 4*5`); and
    without a mark the last one of the text. A number that is part of something else (`2\sqrt{3}`, `7\pi`,
    `(1,4)`, `10-12`) is no answer. Numbers are compared as exact fractions, see `Number.equals`.

    Args:
        column: holds the right answer: a number, or a text with one, such as a whole solution of GSM8K.
        tolerance: largest difference that counts as none.
        relative_tolerance: the same as a share of the right number's size.
        read: see `Read`; with "auto", a mark without a number behind it is passed over.
        name: what metrics call it.

    Raises:
        UserError: a negative tolerance, or an unknown `read`.
    """

    column: str = "answer"
    tolerance: float = 0.0
    relative_tolerance: float = 0.0
    read: Read = "auto"
    name: str = "number"

    def __post_init__(self) -> None:
        check_read("number", self.read)
        for tolerance in (self.tolerance, self.relative_tolerance):
            if not 0 <= tolerance < math.inf:
                raise UserError(f"reward number: tolerance is {tolerance}; expected a number >= 0")

    def __call__(self, /, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """Rewards 0 or 1; None where there is no right answer or the column `verifiable` is false."""
        return _judged(self.name, self.column, completions, columns, self._is_right)

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that the data must have."""
        return (self.column,)

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Refuse a row whose right answer is not one number.

        Raises:
            UserError: it is not; the message begins with `where`.
        """
        if is_checked(row, self.column, where):
            self._gold(row, where)

    def _gold(self, row: Mapping[str, Any], where: str) -> Number:
        answer = row[self.column]
        gold = gold_number(answer)
        if gold is None:
            raise UserError(
                f"{where}: column {self.column} is {shown(answer)}, which is not one number; expected a "
                "number, or a text with one such as '#### 72': use the reward math for roots, intervals and "
                "the like, or leave such rows out"
            )
        return gold

    def _is_right(self, text: str, row: Mapping[str, Any], where: str) -> bool:
        gold = self._gold(row, where)
        number = read_number(text, self.read)
        return number is not None and number.equals(
            gold, tolerance=self.tolerance, relative_tolerance=self.relative_tolerance
        )


@dataclass(frozen=True)
class ChoiceReward:
    """1 where the completion commits to the right one of several choices, else 0.

    A choice is named by its text, in whole words and any case, or by its letter: `B`, `(B)`, `B.`, `B)`,
    `option B`. A completion that names several different choices, or none, is wrong; what it says behind
    "because" or "since" does not count.

    Args:
        column: holds the answer: a choice's text, its 0-based index, or its letter.
        choices: column that holds the choices: a list, a JSON list in a string, or `a|b|c`.
        read: see `Read`.
        name: what metrics call it.

    Raises:
        UserError: an unknown `read`.
    """

    column: str = "answer"
    choices: str = "choices"
    read: Read = "auto"
    name: str = "choice"

    def __post_init__(self) -> None:
        check_read("choice", self.read)

    def __call__(self, /, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """Rewards 0 or 1; None where there is no right answer or the column `verifiable` is false."""
        return _judged(self.name, self.column, completions, columns, self._is_right)

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that the data must have."""
        return (self.column, self.choices)

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Refuse a row without choices, or whose answer is none of them.

        Raises:
            UserError: it is; the message begins with `where`.
        """
        if is_checked(row, self.column, where):
            self._record(row, where)

    def _record(self, row: Mapping[str, Any], where: str) -> QARecord:
        if self.choices not in row:
            raise UserError(f"{where}: there is no column {self.choices} with the choices; name another one")
        # As `qa_from_row` reads data sets of questions about stories; only choices and answer matter here.
        named = {"choices": row[self.choices], "answer": row[self.column]}
        return qa_from_row({"story": "-", "question": "-", **named}, where=where)

    def _is_right(self, text: str, row: Mapping[str, Any], where: str) -> bool:
        record = self._record(row, where)
        return read_choice(answer_part(text, self.read), record.choices) == record.answer


@dataclass(frozen=True)
class ExactReward:
    """1 where the completion is the right answer but for case, white space and punctuation around it, else 0.

    Args:
        column: holds the right answer, or a list of right answers.
        read: see `Read`.
        name: what metrics call it.

    Raises:
        UserError: an unknown `read`.
    """

    column: str = "answer"
    read: Read = "auto"
    name: str = "exact"

    def __post_init__(self) -> None:
        check_read("exact", self.read)

    def __call__(self, /, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """Rewards 0 or 1; None where there is no right answer or the column `verifiable` is false."""
        return _judged(self.name, self.column, completions, columns, self._is_right)

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that the data must have."""
        return (self.column,)

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Refuse a row whose right answer is neither a text nor a list of texts.

        Raises:
            UserError: it is; the message begins with `where`.
        """
        if is_checked(row, self.column, where):
            self._accepted(row, where)

    def _accepted(self, row: Mapping[str, Any], where: str) -> list[Any]:
        answer = row[self.column]
        accepted = list(answer) if isinstance(answer, list | tuple) else [answer]
        if not accepted or not all(isinstance(item, str | int | float) for item in accepted):
            raise UserError(
                f"{where}: column {self.column} is {answer!r}; expected a text or a list of texts"
            )
        return accepted

    def _is_right(self, text: str, row: Mapping[str, Any], where: str) -> bool:
        accepted = {normal_form(str(item)) for item in self._accepted(row, where)}
        return normal_form(answer_part(text, self.read)) in accepted


RULES: dict[str, type] = {"number": NumberReward, "choice": ChoiceReward, "exact": ExactReward}
"""What `RewardFunctionFactory.from_spec` calls them."""


def checked_rows(
    name: str, column: str, completions: Sequence[Text], columns: Mapping[str, Sequence[Any]]
) -> list[tuple[Mapping[str, Any], str] | None]:
    """The row of each completion and what messages call it; None where it has no answer that can be checked.

    Raises:
        UserError: there is no column of right answers.
    """
    if column not in columns:
        raise UserError(
            f"reward {name} needs a column {column} with the right answers; name another one with "
            f"{name}:column=NAME, or add it to the data"
        )
    per_sample = {k: values for k, values in columns.items() if _is_per_sample(values, len(completions))}
    rows: list[tuple[Mapping[str, Any], str] | None] = []
    for i, completion in enumerate(completions):
        row = {key: values[i] for key, values in per_sample.items()}
        where = f"reward {name}, {sample_name(i, completion)}"
        rows.append((row, where) if is_checked(row, column, where) else None)
    return rows


def shown(value: Any) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _judged(
    name: str,
    column: str,
    completions: Sequence[Text],
    columns: Mapping[str, Sequence[Any]],
    is_right: Callable[[str, Mapping[str, Any], str], bool],
) -> list[float | None]:
    """1 or 0 for each completion; None where the row has no answer or is not verifiable."""
    rows = checked_rows(name, column, completions, columns)
    return [
        None if row is None else float(is_right(text_of(completion), *row))
        for completion, row in zip(completions, rows, strict=True)
    ]


def is_checked(row: Mapping[str, Any], column: str, where: str) -> bool:
    """Whether a row has a right answer to check completions with.

    Raises:
        UserError: its column `verifiable` says neither yes nor no; the message begins with `where`.
    """
    try:
        return can_be_checked(row.get(COLUMN)) and row.get(column) is not None
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _is_per_sample(values: Any, count: int) -> bool:
    is_column = hasattr(values, "__getitem__") and not isinstance(values, str | bytes | Mapping)
    return is_column and len(values) == count


def check_read(rule: str, read: str) -> None:
    """Refuse a `read` that is unknown."""
    if read not in get_args(Read):
        raise UserError(f"reward {rule}: read is {read!r}; expected one of {', '.join(get_args(Read))}")
