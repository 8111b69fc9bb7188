"""Rows on their way through the preparation: read, and brought into the form that is written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError
from rlhf_data.preprocessing.config import PreprocessConfig
from rlhf_data.preprocessing.rules import is_tie
from rlhf_data.preprocessing.similarity import completion_similarity, count_words, longest_words
from rlhf_data.readers.files import row_parser, scan_rows
from rlhf_data.readers.json_lines import row_place
from rlhf_data.readers.locations import data_files
from rlhf_data.records.encode import Encoder
from rlhf_data.records.forms import FORMS
from rlhf_data.records.kind import Record
from rlhf_data.records.preference import PreferenceRecord
from rlhf_data.records.row import Row
from rlhf_data.records.truncation import shorten_prompt, token_borders

_RATINGS = (
    ("chosen_rating", "rejected_rating"),
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
)
"""Columns of the ratings of both completions, as data sets call them."""


@dataclass(frozen=True, slots=True)
class Item:
    """A record, or what is wrong with its row.

    Attributes:
        record: None for a bad row.
        error: None for a good one.
        where: the place of its row.
        source: what it belongs to, where rows are of several sources.
    """

    record: Record | None
    error: UserError | None
    where: str
    source: str


def read_items(
    paths: Sequence[str],
    kind: str,
    config: PreprocessConfig,
    *,
    columns: Mapping[str, str] | None = None,
    source_column: str | None = None,
) -> Iterator[Item]:
    """Yield the records of the rows of files, and what is wrong with bad rows.

    Args:
        paths: as for `scan_rows`.
        kind: kind of the records; see `load_records`.
        config: whose margins may be those of ratings.
        columns: the files' names of columns.
        source_column: column that names the source; by default the file is.

    Raises:
        UserError: a file cannot be read, or an unknown kind or column.
    """
    parse = row_parser(kind, columns or {})
    for path in itertools.chain.from_iterable(data_files(path) or [path] for path in paths):
        place = row_place(path, 0).removesuffix("0")
        for number, row in scan_rows(path):
            where = f"{place}{number}"
            if isinstance(row, UserError):
                yield Item(None, row, where, Path(path).name)
                continue
            source = Path(path).name
            try:
                if source_column is not None:
                    source = _source(row, source_column, where)
                records = parse(row, where)
                if config.margins == "ratings":
                    records = tuple(_rated(record, row) for record in records)
            except UserError as error:
                yield Item(None, error, where, source)
                continue
            for record in records:
                yield Item(record, None, where, source)


def _source(row: Mapping[str, Any], column: str, where: str) -> str:
    """The source that a row names."""
    if row.get(column) is None:
        raise UserError(
            f"{where}, field {column}: missing; expected the row's source",
            code="missing_column",
            column=column,
        )
    source = str(row[column])
    if source.encode(errors="replace").decode() != source:
        raise UserError(
            f"{where}, field {column}: half of a surrogate pair is not text; correct it",
            code="invalid_text",
            column=column,
        )
    return source


def detect_kind(path: str, columns: Mapping[str, str] | None = None) -> str:
    """The kind of records that the columns of a file's first good row are of.

    Args:
        path: as for `scan_rows`.
        columns: the file's name of a column, by its usual name.

    Raises:
        UserError: the file cannot be read, has no good row, or is of a kind that cannot be prepared.
    """
    rows, first = scan_rows(path), None
    for _, row in rows:
        if not isinstance(row, UserError):
            break
        first = first or row
    else:
        raise first or UserError(f"{path} holds no rows", code="no_rows")
    names = row.keys() | {name for name, column in (columns or {}).items() if column in row}
    kinds = {kind for form in FORMS if set(form.needs) <= names for kind in form.kinds}
    if "preference" in kinds or {"chosen", "rejected"} <= names:
        return "preference"
    if kinds or "labels" in names:
        raise UserError(
            f"{path}: rows with labels of steps cannot be prepared; give pairs, labelled completions, "
            "conversations or prompts",
            code="unknown_kind",
        )
    if "label" in names:
        return "kto"
    written = {"completion", "response", "messages", "conversations", "text", "output"}
    return "sft" if written & names else "prompt"


def _rated(record: Record, row: Mapping[str, Any]) -> Record:
    """The pair with the difference of its ratings as margin."""
    if not isinstance(record, PreferenceRecord):
        raise UserError(
            "margins is ratings, and the rows are not pairs of completions; leave it out",
            code="invalid_value",
            key="margins",
        )
    rated = Row(dict(row), {}, record.where)
    for one, other in _RATINGS:
        if rated.has(one, other):
            return replace(record, margin=rated.number(one) - rated.number(other))
    known = " or ".join(map(" and ".join, _RATINGS))
    raise UserError(
        f"{record.where}: no ratings for a margin; expected numbers in {known}",
        code="missing_column",
        column=_RATINGS[0][0],
    )


class Finisher:
    """Brings records into the form that is written: converted, shortened, with their margins.

    Lengths are counted in tokens, or in words without a tokenizer.
    """

    def __init__(self, config: PreprocessConfig, tokenizer: Any = None) -> None:
        self.config = config
        self.encoder = None if tokenizer is None else Encoder(tokenizer)

    def converted(self, record: Record) -> Record:
        """The record in the wanted form, with its margin."""
        if self.config.convert == "messages":
            record = record.as_messages()
        if not isinstance(record, PreferenceRecord):
            return record
        if self.config.margins == "similarity":
            return replace(record, margin=1 - completion_similarity(record.chosen, record.rejected))
        tied = self.config.ties == "margin0" and is_tie(record, self.config.tie_similarity)
        return replace(record, margin=0.0) if tied else record

    def lengths(self, record: Record) -> tuple[int, int]:
        """Tokens or words of the longest sequence, and of the shortest completion (0 if there is none)."""
        prompt, completions = record.parts()
        if self.encoder is None:
            return longest_words(prompt, completions), min(map(count_words, completions), default=0)
        if not completions:
            return self.encoder.lengths(prompt, (), record.template)[0], 0
        both, start = self.encoder.completions(prompt, completions, record.template)
        return max(map(len, both)), min(map(len, both)) - start

    def shortened(self, record: Record) -> Record | None:
        """The record with a prompt that lets it fit in `max_length`; None if there is none."""
        limit, keep = self.config.max_length, self.config.truncation
        if keep not in ("left", "middle") or limit is None:
            return None
        prompt, completions = record.parts()
        if self.encoder is not None:
            shorter = self.encoder.shorten(prompt, completions, record.template, limit, keep)
        else:
            shorter = shorten_prompt(
                prompt,
                lambda text: longest_words(text, completions) <= limit,
                keep=keep,
                borders=token_borders(None),
            )
        return None if shorter is None else record.with_prompt(shorter)
