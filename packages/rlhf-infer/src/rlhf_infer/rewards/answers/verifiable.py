r"""Rewards for answers that can be checked: numbers, choices, exact texts.

Where in a completion the answer is: see `rlhf_infer.rewards.answers.read_answers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from rlhf_data import QARecord, Text, UserError, check_choice, invalid_value, qa_from_row
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


class AnswerRule:
    """Compares what a completion gives as its answer with the right one, which is a column of the data."""

    is_probability: ClassVar[bool] = True
    column: str
    """Holds the right answer."""
    read: Read
    name: str
    """Name in metrics."""

    def __post_init__(self) -> None:
        check_choice(f"reward {self.name}: read", self.read, get_args(Read))

    def right_answer(self, row: Mapping[str, Any], where: str) -> Any:
        """The reference that `is_right` compares with.

        Raises:
            UserError: the row holds none; the message begins with `where`.
        """
        raise NotImplementedError

    def is_right(self, text: str, right: Any) -> bool:
        """Whether a completion's text gives the right answer."""
        raise NotImplementedError

    def __call__(self, /, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """Rewards 0 or 1; None if there is no right answer or the column `verifiable` is false."""
        rows = self.checked_rows(completions, columns)
        return [
            None if row is None else float(self.is_right(text_of(completion), self.right_answer(*row)))
            for completion, row in zip(completions, rows, strict=True)
        ]

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that the data must have."""
        return (self.column,)

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Refuse a row of the data whose right answer cannot be compared with."""
        if is_checked(row, self.column, where):
            self.right_answer(row, where)

    def checked_rows(
        self, completions: Sequence[Text], columns: Mapping[str, Sequence[Any]]
    ) -> list[tuple[Mapping[str, Any], str] | None]:
        """The row of each completion and what messages call it; None if its answer cannot be checked."""
        if self.column not in columns:
            raise UserError(
                f"reward {self.name} needs a column {self.column} with the right answers; name another one "
                f"with {self.name}:column=NAME, or add it to the data",
                code="missing_column",
                column=self.column,
            )
        per_sample = {k: values for k, values in columns.items() if _is_per_sample(values, len(completions))}
        rows: list[tuple[Mapping[str, Any], str] | None] = []
        for i, completion in enumerate(completions):
            row = {key: values[i] for key, values in per_sample.items()}
            where = f"reward {self.name}, {sample_name(i, completion)}"
            rows.append((row, where) if is_checked(row, self.column, where) else None)
        return rows


@dataclass(frozen=True)
class NumberReward(AnswerRule):
    r"""1 where the completion's number equals the right one, else 0, also if there is no number.

    The completion's number is all that a box holds, but for a unit or `x =`; the first one after `####`,
    "answer is" or in a tag, after the last `=` of that line unless a working follows it (`20 = 4*5`); and
    without a mark the last one of the text. A number that is part of something else (`2\sqrt{3}`, `7\pi`,
    `(1,4)`, `10-12`) is not an answer. Numbers are compared as exact fractions, see `Number.equals`.

    Args:
        column: holds the right answer: a number, or a text with one, such as a whole solution of GSM8K.
        tolerance: largest difference that counts as none.
        relative_tolerance: the same as a share of the right number's size.
        read: see `Read`; with "auto", a mark without a number after it is passed over.
        name: what metrics call it.
    """

    column: str = "answer"
    tolerance: float = 0.0
    relative_tolerance: float = 0.0
    read: Read = "auto"
    name: str = "number"

    def __post_init__(self) -> None:
        super().__post_init__()
        for tolerance in (self.tolerance, self.relative_tolerance):
            if not 0 <= tolerance < math.inf:
                raise invalid_value(
                    f"reward number: tolerance is {tolerance}; expected a number >= 0", "tolerance"
                )

    def right_answer(self, row: Mapping[str, Any], where: str) -> Number:
        """One number."""
        answer = row[self.column]
        gold = gold_number(answer)
        if gold is None:
            raise UserError(
                f"{where}: column {self.column} is {shown(answer)}, which is not one number; expected a "
                "number, or a text with one such as '#### 72': use the reward math for roots, intervals and "
                "the like, or leave such rows out",
                code="invalid_answer",
                where=where,
            )
        return gold

    def is_right(self, text: str, right: Number) -> bool:
        """Whether the text's number is that one."""
        number = read_number(text, self.read)
        return number is not None and number.equals(
            right, tolerance=self.tolerance, relative_tolerance=self.relative_tolerance
        )


@dataclass(frozen=True)
class ChoiceReward(AnswerRule):
    """1 where the completion commits to the right one of several choices, else 0.

    A choice is named by its text, in whole words and any case, or by its letter: `B`, `(B)`, `B.`, `B)`,
    `option B`. A completion that names several different choices, or none, is wrong; what it says after
    "because" or "since" does not count.

    Args:
        column: holds the answer: a choice's text, its 0-based index, or its letter.
        choices: column that holds the choices: a list, a JSON list in a string, or `a|b|c`.
        read: see `Read`.
        name: what metrics call it.
    """

    column: str = "answer"
    choices: str = "choices"
    read: Read = "auto"
    name: str = "choice"

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that the data must have."""
        return (self.column, self.choices)

    def right_answer(self, row: Mapping[str, Any], where: str) -> QARecord:
        """A question with its choices."""
        if self.choices not in row:
            raise UserError(
                f"{where}: there is no column {self.choices} with the choices; name another one",
                code="missing_column",
                column=self.choices,
            )
        # As `qa_from_row` reads data sets of questions about stories; only choices and answer matter here.
        named = {"choices": row[self.choices], "answer": row[self.column]}
        return qa_from_row({"story": "-", "question": "-", **named}, where=where)

    def is_right(self, text: str, right: QARecord) -> bool:
        """Whether the text commits to its answer."""
        return read_choice(answer_part(text, self.read), right.choices) == right.answer


@dataclass(frozen=True)
class ExactReward(AnswerRule):
    """1 if the completion is the right answer but for case, white space and punctuation around it, else 0."""

    column: str = "answer"
    read: Read = "auto"
    name: str = "exact"

    def right_answer(self, row: Mapping[str, Any], where: str) -> set[str]:
        """A text or a list of texts, in normal form."""
        answer = row[self.column]
        accepted = list(answer) if isinstance(answer, list | tuple) else [answer]
        if not accepted or not all(isinstance(item, str | int | float) for item in accepted):
            raise UserError(
                f"{where}: column {self.column} is {answer!r}; expected a text or a list of texts",
                code="not_a_text",
            )
        return {normal_form(str(item)) for item in accepted}

    def is_right(self, text: str, right: set[str]) -> bool:
        """Whether the text's answer is one of them."""
        return normal_form(answer_part(text, self.read)) in right


RULES: dict[str, type] = {"number": NumberReward, "choice": ChoiceReward, "exact": ExactReward}
"""Rules by their names in `RewardFunctionFactory.from_spec`."""


def shown(value: Any) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def is_checked(row: Mapping[str, Any], column: str, where: str) -> bool:
    """Whether a row has a right answer to check completions with."""
    try:
        return can_be_checked(row.get(COLUMN)) and row.get(column) is not None
    except UserError as error:
        raise UserError(f"{where}: {error}", code=error.code, **error.fields) from error


def _is_per_sample(values: Any, count: int) -> bool:
    is_column = hasattr(values, "__getitem__") and not isinstance(values, str | bytes | Mapping)
    return is_column and len(values) == count
