"""Answers of completions, for majority votes."""

from __future__ import annotations

from rlhf_data import invalid_value
from rlhf_infer.rewards.answers.read_answers import answer_part, normal_form, read_number
from rlhf_infer.sampling.candidates import Extract


def extractor(name: str) -> Extract:
    """The function that finds answers, by name.

    - "number": the number that a text gives as its answer, as an exact fraction (`NumberReward`).
    - "marked": what follows the last mark of an answer (`####`, a box, a tag, "answer is").
    - "text": the same, and if nothing is marked the whole text.

    Texts that differ only by case, white space and punctuation around them are one answer.

    Raises:
        UserError: another name.
    """
    found = {"number": number_answer, "marked": marked_answer, "text": text_answer}
    if name not in found:
        raise invalid_value(
            f"extract is {name!r}; expected one of {', '.join(found)}, or a function in Python", "extract"
        )
    return found[name]


def number_answer(text: str) -> str | None:
    """The number that a text gives as its answer; None without one."""
    number = read_number(text)
    return None if number is None else f"{number.value}{'%' if number.percent else ''}"


def marked_answer(text: str) -> str | None:
    """The marked answer of a text; None without a marker, or with nothing after it."""
    return normal_form(answer_part(text, "marked")) or None


def text_answer(text: str) -> str | None:
    """The marked answer of a text, or all of it but the reasoning; None for an empty text."""
    return normal_form(answer_part(text, "auto")) or None
