r"""Rewards for answers that can be checked: numbers, choices, exact texts.

Where in a completion the answer stands: after the last `####` (GSM8K), in the last `\boxed{}`, in the last
`<answer>`, or after the last "answer is" or "answer:", whichever comes last. A thought, up to `</think>`, is
passed over.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rlhf_data import UserError, qa_from_row
from rlhf_data.transcripts import Text
from rlhf_infer.rewards.amounts import Number, number_of, numbers_in
from rlhf_infer.rewards.texts import sample_name, text_of

Read = Literal["auto", "marked", "whole"]
"""What is read of a completion: where an answer is marked that, else all of it ("auto"); what is marked, or
nothing ("marked"); all of it, whatever is marked ("whole")."""

_HASHES, _BOX = "####", r"\boxed{"
_TAG, _TAG_END = "<answer>", "</answer>"
_PHRASE = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*[:=])", re.IGNORECASE)
_LETTERED = re.compile(r"\(?([A-Z])(?:[).:](?!\w)|\s*$)")
_BRACKETED = re.compile(r"\(([A-Z])\)")
_QUOTES = "\"'“”‘’`* "
_ENDINGS = f"{_QUOTES}.,;:!?"
_THOUGHT_END = "</think>"


@dataclass(frozen=True)
class NumberReward:
    """1 where the completion's number equals the right one, else 0, also where there is no number.

    The completion's number is the first one after `####` or "answer is", behind the last `=` of that line if
    there is one, the last one in a box or tag, and without a mark the last one of the text. Numbers are
    compared as exact fractions, see `Number.equals`.

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
        _check_read("number", self.read)
        for tolerance in (self.tolerance, self.relative_tolerance):
            if not 0 <= tolerance < math.inf:
                raise UserError(f"reward number: tolerance is {tolerance}; expected a number >= 0")

    def __call__(self, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """Rewards 0 or 1; None where there is no right answer or the column `verifiable` is false."""
        return _judged(self.name, self.column, completions, columns, self._is_right)

    def _is_right(self, text: str, answer: Any, where: str, row: Mapping[str, Any]) -> bool:
        del row
        gold = number_of(answer)
        if gold is None and isinstance(answer, str):
            gold = read_number(answer)
        if gold is None:
            raise UserError(
                f"{where}: column {self.column} is {answer!r}, which holds no number; expected a number, or "
                "a text with one such as '#### 72'"
            )
        number = read_number(text, self.read)
        return number is not None and number.equals(
            gold, tolerance=self.tolerance, relative_tolerance=self.relative_tolerance
        )


@dataclass(frozen=True)
class ChoiceReward:
    """1 where the completion commits to the right one of several choices, else 0.

    A choice is named by its text, in whole words and any case, or by its letter: `B`, `(B)`, `B.`, `B)`.
    A completion that names several different choices, or none, is wrong.

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
        _check_read("choice", self.read)

    def __call__(self, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """Rewards 0 or 1; None where there is no right answer or the column `verifiable` is false."""
        return _judged(self.name, self.column, completions, columns, self._is_right)

    def _is_right(self, text: str, answer: Any, where: str, row: Mapping[str, Any]) -> bool:
        if self.choices not in row:
            raise UserError(f"{where}: there is no column {self.choices} with the choices; name another one")
        # As `qa_from_row` reads data sets of questions about stories; only choices and answer matter here.
        named = {"story": "-", "question": "-", "choices": row[self.choices], "answer": answer}
        record = qa_from_row(named, where=where)
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
        _check_read("exact", self.read)

    def __call__(self, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """Rewards 0 or 1; None where there is no right answer or the column `verifiable` is false."""
        return _judged(self.name, self.column, completions, columns, self._is_right)

    def _is_right(self, text: str, answer: Any, where: str, row: Mapping[str, Any]) -> bool:
        del row
        accepted = answer if isinstance(answer, list | tuple) else [answer]
        if not accepted or not all(isinstance(item, str | int | float) for item in accepted):
            raise UserError(
                f"{where}: column {self.column} is {answer!r}; expected a text or a list of texts"
            )
        return normal_form(answer_part(text, self.read)) in {normal_form(str(item)) for item in accepted}


def read_number(text: str, read: Read = "auto") -> Number | None:
    """The number that a text gives as its answer, see `NumberReward`; None without one."""
    mark = None if read == "whole" else _last_mark(text)
    if mark is not None:
        part, first = mark
        if first and numbers_in(result := part.rpartition("=")[2]):
            part = result  # of "12 + 5 = 17" the 17
        if numbers := numbers_in(part):
            return numbers[0 if first else -1]
    if read == "marked":
        return None
    numbers = numbers_in(text if read == "whole" else text.rpartition(_THOUGHT_END)[2])
    return numbers[-1] if numbers else None


def read_choice(text: str, choices: Sequence[str]) -> int | None:
    """Index of the one choice that a text names, see `ChoiceReward`; None where it names none or several."""
    # The loosest form in which the choices still differ: "C" and "C++", "us" and "US" stay apart.
    loosest = (form for form in (normal_form, _folded) if len(set(map(form, choices))) == len(choices))
    form = next(loosest, str)
    forms = [form(choice) for choice in choices]
    if form(text) in forms:
        return forms.index(form(text))
    found = _named_choices(str(text) if form is str else _folded(text), forms)
    found |= {
        index for index in map(string.ascii_uppercase.find, _letters(text)) if 0 <= index < len(choices)
    }
    return found.pop() if len(found) == 1 else None


def normal_form(text: str) -> str:
    """A text without differences of case and white space, quotes around it, and punctuation at its end."""
    folded = _folded(text)
    return folded.lstrip(_QUOTES).rstrip(_ENDINGS) or folded


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _letters(text: str) -> list[str]:
    """Letters that stand for choices: in brackets, in front of a text, or alone."""
    letters = _BRACKETED.findall(text)
    bare = text.strip(string.punctuation + string.whitespace)
    if match := _LETTERED.match(text.strip()):
        letters.append(match[1])
    elif len(bare) == 1:
        letters.append(bare.upper())
    return letters


def _named_choices(text: str, forms: Sequence[str]) -> set[int]:
    """Indices of the choices whose words appear; a choice inside a longer one's words does not count."""
    found = set()
    for i in sorted(range(len(forms)), key=lambda i: -len(forms[i])):
        before = r"(?<![\w.\-−])(?<!\d,)" if forms[i][0].isdigit() else r"(?<!\w)"
        words = re.compile(rf"{before}{re.escape(forms[i])}(?!\w|[.,]\d)")
        if words.search(text):
            found.add(i)
            text = words.sub("\0", text)
    return found


def answer_part(text: str, read: Read) -> str:
    """The part of a text that holds its answer; empty where `read` asks for a mark and there is none."""
    if read == "whole":
        return text
    if mark := _last_mark(text):
        return mark[0]
    return "" if read == "marked" else text.rpartition(_THOUGHT_END)[2]


def _last_mark(text: str) -> tuple[str, bool] | None:
    """What the last mark of an answer marks, and whether its first number counts rather than its last."""
    text = text.rpartition(_THOUGHT_END)[2]
    marks: list[tuple[int, str, bool]] = []
    if (at := text.rfind(_HASHES)) >= 0:
        marks.append((at, _first_line(text[at + len(_HASHES) :]), True))
    if (at := text.rfind(_BOX)) >= 0:
        marks.append((at, _braced(text[at + len(_BOX) :]), False))
    if (end := text.rfind(_TAG_END)) >= 0 and (at := text.rfind(_TAG, 0, end)) >= 0:
        marks.append((at, text[at + len(_TAG) : end], False))
    if phrases := list(_PHRASE.finditer(text)):
        marks.append((phrases[-1].start(), _first_line(text[phrases[-1].end() :]), True))
    if not marks:
        return None
    _, part, first = max(marks)
    if (inner := part.rfind(_BOX)) >= 0:
        part, first = _braced(part[inner + len(_BOX) :]), False
    return part.strip(), first


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""


def _braced(text: str) -> str:
    """The text up to the brace that closes one opened before it; all of it where none does."""
    depth = 1
    for at, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return text[:at]
    return text


def _judged(
    name: str,
    column: str,
    completions: Sequence[Text],
    columns: Mapping[str, Sequence[Any]],
    is_right: Callable[[str, Any, str, Mapping[str, Any]], bool],
) -> list[float | None]:
    """1 or 0 for each completion; None where the row has no answer or is not verifiable."""
    if column not in columns:
        raise UserError(
            f"reward {name} needs a column {column} with the right answers; name another one with "
            f"{name}:column=NAME, or add it to the data"
        )
    rewards: list[float | None] = []
    for i, completion in enumerate(completions):
        row = {key: values[i] for key, values in columns.items() if _is_per_sample(values, len(completions))}
        if row[column] is None or row.get("verifiable") is False:
            rewards.append(None)
        else:
            where = f"reward {name}, {sample_name(i, completion)}"
            rewards.append(float(is_right(text_of(completion), row[column], where, row)))
    return rewards


def _is_per_sample(values: Any, count: int) -> bool:
    is_column = hasattr(values, "__getitem__") and not isinstance(values, str | bytes | Mapping)
    return is_column and len(values) == count


def _check_read(rule: str, read: str) -> None:
    if read not in get_args(Read):
        raise UserError(f"reward {rule}: read is {read!r}; expected one of {', '.join(get_args(Read))}")
