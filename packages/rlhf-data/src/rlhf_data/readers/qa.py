"""Question-answering records: a story, a question, choices, and which choice is right."""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from rlhf_data.config import BaseConfig
from rlhf_data.errors import UserError
from rlhf_data.readers.files import OnBadRow, good_rows, parsed_rows, scan_rows
from rlhf_data.records.choices import choice_texts, parse_choices
from rlhf_data.records.row import check_text

_TEMPLATE_FIELDS = ("choices", "question", "story")
_EVAL_TENTHS = 3


@dataclass(frozen=True)
class QARecord:
    """One multiple-choice question about a story.

    `answer` is the 0-based index of the right choice; None if it is not known. `evidence` are words of the
    story that show it, where somebody marked them. `extra` is everything else known; `where`, the record's
    place in its file, is not compared.
    """

    story: str
    question: str
    choices: tuple[str, ...]
    answer: int | None
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    where: str = field(default="", compare=False)
    evidence: str | None = None

    @property
    def answer_text(self) -> str:
        """The text of the right choice.

        Raises:
            ValueError: it is not known.
        """
        if self.answer is None:
            raise ValueError(f"the right answer to {self.question!r} is not known")
        return self.choices[self.answer]

    def contents(self) -> list[Any]:
        """Identity of a record in checkpoints and caches: all fields but `extra` and `where`."""
        marked = [] if self.evidence is None else [self.evidence]
        return [self.story, self.question, self.choices, self.answer, *marked]


class QADatasetConfig(BaseConfig):
    """How one data set's rows become records and prompts."""

    story_column: str = "story"
    """Column that holds the story."""

    question_column: str = "question"
    """Column that holds the question."""

    choices_column: str = "choices"
    """Column that holds the choices: a list, a JSON list in a string, `a|b|c`, or `{"text": [...], "label":
    [...]}` as in ARC."""

    answer_column: str = "answer"
    """Column that holds the answer: a choice's text, its label, its 0-based index, or its letter."""

    evidence_column: str | None = None
    """Column that holds words of the story that show the right answer, as SQuAD and HotpotQA mark them; a row
    may lack them. Null: none has."""

    prompt_template: str = "{story}\n{question}\n{choices}\n"
    """Text of a prompt, with the placeholders {story}, {question} and {choices}."""

    choice_separator: str = Field(default=" | ", min_length=1)
    """Text between two choices where the prompt lists them."""

    @field_validator("prompt_template")
    @classmethod
    def _known_placeholders(cls, template: str) -> str:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError as error:
            raise ValueError(
                f"{template!r} is not a template ({error}); write a literal brace twice"
            ) from error
        unknown = sorted(set(names) - set(_TEMPLATE_FIELDS))
        if unknown:
            raise ValueError(
                f"placeholder {{{unknown[0]}}} is unknown; use {{story}}, {{question}}, {{choices}}"
            )
        if "question" not in names:
            raise ValueError("the placeholder {question} is missing; add it")
        return template


_DEFAULT = QADatasetConfig()


def load_qa(
    path: str | Path,
    config: QADatasetConfig = _DEFAULT,
    *,
    on_bad_row: OnBadRow = "error",
    skipped: list[str] | None = None,
    needs_answer: bool = True,
    check: Callable[[QARecord], None] | None = None,
) -> list[QARecord]:
    """Read every record of a file of any type that `scan_rows` reads.

    Args:
        path: the file.
        config: which columns hold what.
        on_bad_row: "error" stops at the first bad row, "skip" leaves bad rows out.
        skipped: gets a message for every row that is left out.
        needs_answer: see `qa_from_row`.
        check: raises a UserError for a record that cannot be used, which makes its row a bad one.

    Raises:
        UserError: the file cannot be read, holds no good row, or a row is wrong (file, line and field named).
    """
    skipped = [] if skipped is None else skipped

    def parse(row: dict[str, Any], where: str) -> QARecord:
        record = qa_from_row(row, config, where, needs_answer=needs_answer)
        if check is not None:
            check(record)
        return record

    records = list(good_rows(parsed_rows(scan_rows(path), path, parse), on_bad_row, skipped))
    if not records:
        raise UserError(f"{path} holds no row that can be used; the first: {skipped[0]}", code="no_row_left")
    return records


def qa_from_row(
    row: dict[str, Any],
    config: QADatasetConfig = _DEFAULT,
    where: str = "row",
    *,
    needs_answer: bool = True,
) -> QARecord:
    """Turn one row into a checked record; columns that are not mapped go to `extra`.

    Without `needs_answer` the answer may be missing, null or, as in an empty cell of a table, blank.

    Raises:
        UserError: a column is missing, empty or of the wrong type; half of a surrogate pair in a text; fewer
            than two choices or equal ones; an answer that is none of the choices; evidence that the story
            does not hold. The message starts with `where`.
    """
    columns = (config.story_column, config.question_column, config.choices_column, config.answer_column)
    answer = row.get(config.answer_column)
    if not needs_answer and isinstance(answer, str) and not answer.strip():
        answer = None
    for name in columns if needs_answer else columns[:3]:
        if row.get(name) is None:
            raise UserError(
                f"{where}, field {name}: missing; the row has {', '.join(map(str, row)) or 'no fields'}: "
                "add it or map another column to it",
                code="missing_column",
                where=where,
                column=name,
            )
    story, question = (_text(row[name], f"{where}, field {name}") for name in columns[:2])
    places = f"{where}, field {columns[2]}", f"{where}, field {columns[3]}"
    marked = config.evidence_column
    extra = {name: row[name] for name in row if name not in (*columns, marked)}
    evidence = None if marked is None else _evidence(row.get(marked), story, f"{where}, field {marked}")
    if answer is None:
        choices, right = choice_texts(row[columns[2]], places[0]), None
    else:
        choices, right = parse_choices(row[columns[2]], answer, places)
    for choice in choices:
        check_text(choice, places[0])
    return QARecord(story, question, choices, right, extra, where, evidence)


def render_prompt(record: QARecord, config: QADatasetConfig = _DEFAULT) -> str:
    """Return the prompt of a record: the config's template with story, question and choices filled in."""
    choices = config.choice_separator.join(record.choices)
    return config.prompt_template.format(story=record.story, question=record.question, choices=choices)


def split_of(story: str) -> Literal["train", "eval"]:
    """Return the split a story belongs to, by its text alone: 30% of all texts are "eval".

    The same story is never in both splits, whatever file, order or seed it comes from.
    """
    digest = hashlib.md5(story.encode("utf-8"), usedforsecurity=False).hexdigest()
    return "eval" if int(digest, 16) % 10 < _EVAL_TENTHS else "train"


def _evidence(value: Any, story: str, where: str) -> str | None:
    """The words of a story that are quoted, as they stand there; None for a blank cell.

    Case, punctuation, white space and how Unicode composes letters may differ.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, str):
        raise UserError(
            f"{where}: expected words of the story, or nothing, got {value!r}", code="not_a_text", where=where
        )
    words = re.findall(r"\w+", unicodedata.normalize("NFC", value))
    pattern = r"\b" + r"\W+".join(map(re.escape, words)) + r"\b[.!?]?"
    found = re.search(pattern, unicodedata.normalize("NFC", story), re.IGNORECASE) if words else None
    if found is None:
        raise UserError(
            f"{where}: {value!r} is not in the story; quote words of it, in a row, or leave the cell empty",
            code="foreign_evidence",
            where=where,
        )
    return " ".join(found[0].split())


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"{where}: expected a text that is not empty, got {value!r}", code="not_a_text", where=where
        )
    return check_text(value, where)
