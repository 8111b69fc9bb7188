"""Items of capability suites, and suites from files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_data import UserError, check_text, json_hash, read_rows, row_place
from rlhf_eval.evaluation import is_refusal

How = Literal["choice", "written", "likelihood"]


@dataclass(frozen=True)
class Item:
    """One thing to do.

    Attributes:
        prompt: What the model reads; of a likelihood item, the empty text.
        how: Whether it chooses by likelihood, writes, or is asked how likely a text is.
        choices: Continuations to choose from; of a likelihood item, the one text.
        answer: The right choice.
        checks: What its text must fulfil: names of `CHECKS` with their arguments.
    """

    prompt: str
    how: How
    choices: tuple[str, ...] = ()
    answer: int = 0
    checks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The same for the same item, whatever stands beside it."""
        return json_hash([self.prompt, list(self.choices), dict(self.checks)])[:16]

    def score(self, text: str) -> float:
        """1 if a text fulfils all checks, else 0."""
        return float(all(CHECKS[name](text, argument) for name, argument in self.checks.items()))


def read_suite(path: str | Path) -> list[Item]:
    """The items of a file of rows, each of which says by its columns how it is measured.

    `prompt, choices, answer` is a choice; `prompt, answer` asks for exactly that text; `prompt, checks` names
    checks of instructions; `text` asks how likely a text is.

    Raises:
        UserError: the file cannot be read, or a row is none of these.
    """
    return [_item(row, row_place(str(path), number)) for number, row in read_rows(str(path))]


def _item(row: Mapping[str, Any], where: str) -> Item:
    for columns, make in _FORMS.items():
        if all(row.get(column) is not None for column in columns):
            item = make(row, where)
            for text in (item.prompt, *item.choices, *map(str, item.checks.values())):
                check_text(text, where)
            return item
    raise UserError(
        f"{where}: no item of a capability suite; expected prompt with choices and answer, with answer or "
        "with checks, or text",
        code="missing_value",
    )


def _choice(row: Mapping[str, Any], where: str) -> Item:
    choices = row["choices"]
    choices = json.loads(choices) if isinstance(choices, str) else choices
    answer = row["answer"]
    index = choices.index(answer) if answer in choices else answer
    if not isinstance(index, int) or not 0 <= index < len(choices):
        raise UserError(
            f"{where}: the answer {answer!r} is none of the choices; give one, or its index from 0",
            code="invalid_value",
            key="answer",
        )
    return Item(str(row["prompt"]), "choice", tuple(f" {each}" for each in choices), index)


def _checked(row: Mapping[str, Any], where: str) -> Item:
    checks = row["checks"]
    checks = json.loads(checks) if isinstance(checks, str) else checks
    for name in checks:
        if name not in CHECKS:
            raise UserError(
                f"{where}: unknown check {name}; known are {', '.join(CHECKS)}",
                code="unknown_check",
                check=name,
            )
    return Item(str(row["prompt"]), "written", checks=checks)


_FORMS: dict[tuple[str, ...], Callable[[Mapping[str, Any], str], Item]] = {
    ("prompt", "choices", "answer"): _choice,
    ("prompt", "checks"): _checked,
    ("prompt", "answer"): lambda row, where: Item(
        str(row["prompt"]), "written", checks={"equals": str(row["answer"])}
    ),
    ("text",): lambda row, where: Item("", "likelihood", (str(row["text"]),)),
}


def _words(text: str) -> list[str]:
    return text.split()


def _sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]


def _is_json(text: str, keys: Any) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and set(keys or ()) <= set(found)


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "equals": lambda text, wanted: text.strip() == str(wanted).strip(),
    "number": lambda text, wanted: re.findall(r"-?\d+", text)[:1] == [str(wanted)],
    "contains": lambda text, word: re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None,
    "avoids": lambda text, word: (
        bool(text.strip()) and re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is None
    ),
    "starts_with": lambda text, start: text.strip().startswith(start),
    "ends_with": lambda text, end: text.strip().endswith(end),
    "lower_case": lambda text, wanted: any(map(str.isalpha, text)) and text == text.lower(),
    "upper_case": lambda text, wanted: any(map(str.isalpha, text)) and text == text.upper(),
    "no_commas": lambda text, wanted: bool(text.strip()) and "," not in text,
    "least_words": lambda text, count: len(_words(text)) >= count,
    "most_words": lambda text, count: 0 < len(_words(text)) <= count,
    "sentences": lambda text, count: len(_sentences(text)) == count,
    "bullets": lambda text, count: len(re.findall(r"^\s*[-*] \S", text, re.M)) == count,
    "quoted": lambda text, wanted: len(text.strip()) > 2 and text.strip()[0] == text.strip()[-1] == '"',
    "json": _is_json,
    "refuses": lambda text, wanted: is_refusal(text) is bool(wanted),
}
"""Whether a text fulfils a condition with an argument, by name, as in IFEval (Zhou et al. 2023,
https://arxiv.org/abs/2311.07911); for refusals see `is_refusal`."""
