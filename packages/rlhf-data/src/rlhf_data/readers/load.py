"""Reading the records of a data file, with bad rows refused or counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlhf_data.errors import UserError
from rlhf_data.readers.files import row_place, scan_rows
from rlhf_data.records.kind import Record, record_kind
from rlhf_data.records.row import TEMPLATE_COLUMNS, Row, as_chat_columns, is_instruction

OnBadRow = Literal["error", "skip"]
_Item = TypeVar("_Item")
_UNPAIRED_ROWS = 1000
"""Preference rows of which all chosen completions come before all rejected ones, as TRL orders them."""


@dataclass(frozen=True)
class LoadedRows:
    """The records of a file, and a message for every row that was left out."""

    records: list[Any]
    skipped: list[str]


def load_records(
    path: str | Path,
    kind: str,
    *,
    columns: Mapping[str, str] | None = None,
    on_bad_row: OnBadRow = "error",
    subset_size: int | None = None,
) -> LoadedRows:
    """Read the records of a data file, a `datasets` folder or a data set on the hub.

    Texts may be lists of chat messages. Without `prompt`, transcripts are split at the last turn of the
    assistant, pairs after what they share. `tools` and `chat_template_kwargs` go to the chat template.

    Args:
        path: as for `scan_rows`.
        kind: "sft", "preference", "kto", "steps", "prompt", or another registered `RecordKind`; each has
            its columns.
        columns: the file's name of a column, by the kind's name for it.
        on_bad_row: "error" stops at the first bad row, "skip" leaves bad rows out and counts them.
        subset_size: rows to read at most, bad ones aside; None for all.

    Returns:
        At least one record, in file order; a preference file read as "kto" gives the chosen completions of
        1000 rows, then their rejected ones, and so on.

    Raises:
        UserError: the file cannot be read; a row is bad (file, line and field are named) or all are; an
            unknown column in `columns`.
    """
    skipped: list[str] = []
    rows = good_rows(record_rows(scan_rows(path), path, kind, columns=columns), on_bad_row, skipped)
    records = list(unpaired(first_rows(rows, subset_size)))
    if not records:
        raise UserError(f"{path}: all {len(skipped)} rows are bad; the first: {skipped[0]}")
    return LoadedRows(records, skipped)


def record_rows(
    rows: Iterable[tuple[int, dict[str, Any] | UserError]],
    path: str | Path,
    kind: str,
    *,
    columns: Mapping[str, str] | None = None,
) -> Iterator[tuple[Record, ...] | UserError]:
    """Yield what each row of a file becomes: its records (of "kto" perhaps two), or what is wrong with it.

    Args:
        rows: number and row, or what is wrong with it.
        path: what errors call the file.
        kind: as for `load_records`, like `columns`.
        columns: see there.

    Raises:
        UserError: an unknown kind, or an unknown column in `columns`.
    """
    parse = row_parser(kind, columns or {})
    for number, row in rows:
        if isinstance(row, UserError):
            yield row
            continue
        try:
            yield parse(row, row_place(path, number))
        except UserError as error:
            yield error


def row_parser(kind: str, columns: Mapping[str, str]) -> Callable[[dict[str, Any], str], tuple[Record, ...]]:
    """Return the function that turns a row, and the name of its place, into records.

    Args:
        kind: as for `load_records`.
        columns: the file's name of a column, by its usual name.

    Raises:
        UserError: an unknown kind or column; the function raises it for a bad row, naming the field.
    """
    found = record_kind(kind)
    names = (*found.columns, *TEMPLATE_COLUMNS)
    for name in columns:
        if name not in names:
            raise UserError(f"columns: unknown column {name!r}; expected {', '.join(names)}")

    def records(row: dict[str, Any], where: str) -> tuple[Record, ...]:
        if "prompt" in columns or not is_instruction(row):
            return found.parse(Row(row, columns, where))
        alpaca = Row(as_chat_columns(row, where), columns, where)
        return tuple(replace(record, is_chat=True) for record in found.parse(alpaca))

    return records


def good_rows(rows: Iterable[_Item | UserError], on_bad_row: OnBadRow, skipped: list[str]) -> Iterator[_Item]:
    """Yield what is no error; put the messages of errors into `skipped` where bad rows are skipped.

    Raises:
        UserError: a bad row, unless `on_bad_row` is "skip"; an `on_bad_row` of another name.
    """
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"on_bad_row must be error or skip, got {on_bad_row!r}")
    for row in rows:
        if not isinstance(row, UserError):
            yield row
        elif on_bad_row == "skip":
            skipped.append(str(row))
        else:
            raise UserError(f"{row}; or skip bad rows (on_bad_row: skip)") from row


def first_rows(rows: Iterable[_Item], subset_size: int | None) -> Iterator[_Item]:
    """Yield the first `subset_size` rows, all of them where it is None.

    Raises:
        UserError: a size below 1.
    """
    if subset_size is not None and subset_size < 1:
        raise UserError(f"subset_size must be at least 1, got {subset_size}")
    return islice(rows, subset_size)


def unpaired(rows: Iterable[tuple[_Item, ...]]) -> Iterator[_Item]:
    """Yield the first item of 1000 rows, then their second ones where they have two, and so on."""
    rows = iter(rows)
    while block := list(islice(rows, _UNPAIRED_ROWS)):
        yield from (row[0] for row in block)
        yield from (item for row in block for item in row[1:])
