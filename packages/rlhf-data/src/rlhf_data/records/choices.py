"""Multiple choice: the choices of a question and which of them is right, in the spellings of data sets."""

from __future__ import annotations

import json
import string
from typing import Any

from rlhf_data.errors import UserError

_DIGITS = 10
"""Most digits of an index; a longer number is not one."""


def parse_choices(value: Any, answer: Any, where: tuple[str, str]) -> tuple[tuple[str, ...], int]:
    """Read choices and the index of the right one.

    Args:
        value: a list, a JSON list in a text, `a|b|c`, or `{"text": [...], "label": [...]}` as in ARC.
        answer: a choice's text, its label, its index from 0, or its letter. A number that is the index of one
            choice and the text of another is refused; in quotes it is the text.
        where: the places of both, for errors.

    Returns:
        At least two texts, all different, and the index of the right one.
    """
    listed, labels = _labelled(value, where[0])
    choices = _choices(listed, where[0])
    if str(answer) in labels:
        return choices, labels.index(str(answer))
    return choices, _answer_index(answer, choices, where[1])


def choice_texts(value: Any, where: str) -> tuple[str, ...]:
    """The choices alone, as `parse_choices` reads them, of a question whose right answer is not known."""
    return _choices(_labelled(value, where)[0], where)


def _choices(value: Any, where: str) -> tuple[str, ...]:
    items = _split_choices(value, where) if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise UserError(f"{where}: expected a list of texts, got {value!r}", code="invalid_value")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | float) or not str(item).strip():
            raise UserError(
                f"{where}: every choice must be a text that is not empty, got {item!r}",
                code="invalid_choice",
                where=where,
            )
    texts = tuple(str(item).strip() for item in items)
    if len(texts) < 2:
        raise UserError(
            f"{where}: expected at least two choices, got {value!r}", code="too_few_choices", where=where
        )
    if len(set(texts)) < len(texts):
        double = next(text for text in texts if texts.count(text) > 1)
        raise UserError(
            f"{where}: choice {double!r} appears twice; choices must differ",
            code="repeated_choice",
            where=where,
        )
    return texts


def _labelled(value: Any, where: str) -> tuple[Any, list[str]]:
    """The choices' texts, and their labels where they come as `{"text": [...], "label": [...]}`."""
    if not isinstance(value, dict):
        return value, []
    texts, labels = value.get("text"), value.get("label")
    if (
        not isinstance(texts, list)
        or not isinstance(labels, list)
        or len(texts) != len(labels)
        or len(set(map(str, labels))) < len(labels)
    ):
        raise UserError(
            f'{where}: expected a list of texts, or {{"text": [...], "label": [...]}} with another label '
            f"for every text, got {value!r}",
            code="not_a_list",
            where=where,
        )
    return texts, [str(label) for label in labels]


def _split_choices(text: str, where: str) -> list[Any]:
    if not text.lstrip().startswith("["):
        return text.split("|")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f'{where}: {text!r} is not a JSON list ({error.msg}); write ["a", "b"] or a|b',
            code="invalid_json",
            where=where,
        ) from error


def _answer_index(value: Any, choices: tuple[str, ...], where: str) -> int:
    expected = f"expected one of the choices {list(choices)}, a 0-based index or a letter"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(f"{where}: {expected}, got {value!r}", code="invalid_answer", where=where)
    text = str(value).strip()
    if isinstance(value, int):
        if any(_is_number(choice, value) and index != value for index, choice in enumerate(choices)):
            raise UserError(
                f"{where}: {value} may be an index or one of the choices {list(choices)}; write the choice's "
                "text in quotes, or its letter",
                code="ambiguous_answer",
                where=where,
            )
        index = value
    elif text in choices:
        index = choices.index(text)
    elif text.isascii() and text.isdigit() and len(text) <= _DIGITS:
        index = int(text)
    elif len(text) == 1 and text in string.ascii_letters:
        index = string.ascii_uppercase.index(text.upper())
    else:
        raise UserError(
            f"{where}: {value!r} is not among the choices; {expected}", code="unknown_answer", where=where
        )
    if not 0 <= index < len(choices):
        raise UserError(
            f"{where}: {value!r} is outside the {len(choices)} choices; {expected}",
            code="answer_out_of_range",
            where=where,
        )
    return index


def _is_number(text: str, number: int) -> bool:
    try:
        return float(text) == number
    except ValueError:
        return False
