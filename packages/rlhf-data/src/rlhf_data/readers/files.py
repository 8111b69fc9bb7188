"""Data files, row by row, and the records of their rows; errors name file, line and problem."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedIOBase
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlhf_data.errors import UserError
from rlhf_data.readers.json_lines import Rows, damaged, is_damage, open_lines, row_place
from rlhf_data.readers.lmdb_rows import read_lmdb
from rlhf_data.readers.locations import data_files, is_hub_name
from rlhf_data.readers.tables import MAX_LINE_BYTES, TOO_LONG, read_arrow, read_csv, read_hub, read_parquet
from rlhf_data.records.kind import Record, record_kind
from rlhf_data.records.row import TEMPLATE_COLUMNS, Row, joined_columns, usual_columns

OnBadRow = Literal["error", "skip"]
_Item = TypeVar("_Item")
UNPAIRED_ROWS = 1000
"""Preference rows of which all chosen completions come before all rejected ones, as TRL orders them."""
Columns = Mapping[str, str | Sequence[str]]
"""A file's name for a column, or the columns whose texts make it, by its usual name."""


@dataclass(frozen=True)
class LoadedRows:
    """The records of a file, and a message for every row that was left out."""

    records: list[Any]
    skipped: list[str]


def load_records(
    path: str | Path,
    kind: str,
    *,
    columns: Columns | None = None,
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
        columns: the file's name of a column, by the kind's name for it; of several names the texts are
            joined, a blank line between.
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
    found = (record_rows(scan_rows(file), file, kind, columns=columns) for file in data_files(path))
    rows = good_rows(chain.from_iterable(found), on_bad_row, skipped)
    records = list(unpaired(first_rows(rows, subset_size)))
    if not records:
        raise UserError(
            f"{path}: all {len(skipped)} rows are bad; the first: {skipped[0]}", code="no_row_left"
        )
    return LoadedRows(records, skipped)


def record_rows(
    rows: Iterable[tuple[int, dict[str, Any] | UserError]],
    path: str | Path,
    kind: str,
    *,
    columns: Columns | None = None,
) -> Iterator[tuple[Record, ...] | UserError]:
    """Parse each row of a file into its records (of "kto" perhaps two), or the error that describes it.

    Args:
        rows: number and row, or what is wrong with it.
        path: what errors call the file.
        kind: as for `load_records`, like `columns`.
        columns: see there.

    Raises:
        UserError: an unknown kind, or an unknown column in `columns`.
    """
    return parsed_rows(rows, path, row_parser(kind, columns or {}))


def parsed_rows(
    rows: Iterable[tuple[int, dict[str, Any] | UserError]],
    path: str | Path,
    parse: Callable[[dict[str, Any], str], _Item],
) -> Iterator[_Item | UserError]:
    """Yield what `parse` makes of each row and the name of its place, or what is wrong with the row."""
    for number, row in rows:
        try:
            yield row if isinstance(row, UserError) else parse(row, row_place(path, number))
        except UserError as error:
            yield error


def row_parser(kind: str, columns: Columns) -> Callable[[dict[str, Any], str], tuple[Record, ...]]:
    """Return the function that turns a row, and the name of its place, into records."""
    found = record_kind(kind)
    names = (*found.columns, *TEMPLATE_COLUMNS)
    for name in columns:
        if name not in names:
            raise UserError(
                f"columns: unknown column {name!r}; expected {', '.join(names)}",
                code="unknown_column",
                column=name,
            )

    joined = {name: parts for name, parts in columns.items() if not isinstance(parts, str)}
    named = {name: column for name, column in columns.items() if isinstance(column, str)}

    def records(row: dict[str, Any], where: str) -> tuple[Record, ...]:
        if joined:
            row = joined_columns(row, joined, where)
        values, is_chat = usual_columns(row, kind, columns, where)
        found_records = found.parse(Row(dict(values), named, where))
        if not is_chat:
            return found_records
        # Messages are turns of a chat whatever their form.
        return tuple(replace(each, is_chat=isinstance(each.parts()[0], str)) for each in found_records)

    return records


def good_rows(rows: Iterable[_Item | UserError], on_bad_row: OnBadRow, skipped: list[str]) -> Iterator[_Item]:
    """Yield what is not an error; put the messages of errors into `skipped` where bad rows are skipped."""
    if on_bad_row not in ("error", "skip"):
        raise UserError(
            f"on_bad_row must be error or skip, got {on_bad_row!r}", code="invalid_value", key="on_bad_row"
        )
    for row in rows:
        if not isinstance(row, UserError):
            yield row
        elif on_bad_row == "skip":
            skipped.append(str(row))
        else:
            raise skippable(row) from row


def skippable(error: UserError) -> UserError:
    """The error for a bad row, with how to leave such rows out."""
    hint = 'or skip bad rows (--on-bad-row skip; in Python on_bad_row="skip")'
    return UserError(f"{error}; {hint}", code=error.code, **error.fields)


def first_rows(rows: Iterable[_Item], subset_size: int | None) -> Iterator[_Item]:
    """Yield the first `subset_size` rows, all of them where it is None."""
    if subset_size is not None and subset_size < 1:
        raise UserError(
            f"subset_size must be at least 1, got {subset_size}", code="invalid_value", key="subset_size"
        )
    return islice(rows, subset_size)


def unpaired(rows: Iterable[tuple[_Item, ...]]) -> Iterator[_Item]:
    """Yield the first item of 1000 rows, then their second ones where they have two, and so on."""
    rows = iter(rows)
    while block := list(islice(rows, UNPAIRED_ROWS)):
        yield from (row[0] for row in block)
        yield from (item for row in block for item in row[1:])


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and row of a data file as `scan_rows` does, and stop at the first bad one.

    Raises:
        UserError: as `scan_rows`, or a bad row.
    """
    for number, row in scan_rows(path):
        if isinstance(row, UserError):
            raise row
        yield number, row


def scan_rows(path: str | Path) -> Rows:
    """Yield the rows of a data file, one at a time; a bad row comes as the `UserError` that describes it.

    Args:
        path: `.jsonl`, `.jsonl.gz` or `.jsonl.zst` (one object a line; blank lines are skipped), `.csv` (with
            a header), `.parquet`, `.arrow`, `.json` (a list of objects, or an object whose "data" is such a
            list), an LMDB folder, a folder of shards or a pattern (see `data_files`), or the name of a data
            set on the Hugging Face hub: `owner/name`, `owner/name:split` (without a split: "train") or
            `owner/name/PART:split`, where PART is a configuration or a folder of the data set (needs the
            `datasets` library). A text in a `.json` list is a prompt.

    Yields:
        The row's number from 1 (`.jsonl` and `.csv`: its line; of several files counted on), and the row or
        what is wrong with it.

    Raises:
        UserError: a file is missing, of an unknown type, without rows, or cannot be read any further.
    """
    files = data_files(path)
    if len(files) > 1:
        yield from enumerate((row for file in files for _, row in scan_rows(file)), start=1)
        return
    empty, file = True, files[0] if files else str(path)
    try:
        for number, row in _reader(file)(Path(file)) if files else ():
            empty = False
            yield number, row
    except OSError as error:
        raise UserError(
            f"data file {file} cannot be read ({error.strerror or error})", code="unreadable_file"
        ) from error
    if empty:
        raise UserError(f"data file {file} holds no rows; expected at least one", code="no_rows")


def _reader(source: str | Path) -> Callable[[Path], Rows]:
    path, name = Path(source), Path(source).name.lower()
    reader = next((reader for suffix, reader in _READERS.items() if name.endswith(suffix)), None)
    if path.is_dir():
        return _read_lmdb
    if reader is None and not path.exists() and is_hub_name(str(source)):
        return _numbered(lambda _: read_hub(str(source)))
    if reader is None and path.exists():
        raise UserError(
            f"data file {source}: unknown type {path.suffix!r}, expected {', '.join(_READERS)} or a folder",
            code="unknown_file_type",
        )
    if reader is None or not path.exists():
        raise UserError(f"data file {source} does not exist; check the path", code="file_not_found")
    return reader


def _read_json(path: Path) -> Rows:
    data = path.read_bytes()
    text = _decode(data, f"data file {path}")
    if not text.strip():
        return
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; name it .jsonl if each line is an object" if error.msg == "Extra data" else ""
        raise UserError(
            f"{path}, line {error.lineno}: invalid JSON ({error.msg}){hint}",
            code="invalid_json",
            line=error.lineno,
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: invalid JSON ({error}); correct the file", code="damaged_file") from error
    if isinstance(values, dict) and "data" in values:
        values = values["data"]
    if not isinstance(values, list):
        raise UserError(
            f'{path}: expected a list of objects, or an object with such a list under "data"',
            code="not_a_list",
        )
    for number, row in enumerate(values, start=1):
        row = {"prompt": row} if isinstance(row, str) else row
        yield number, _attempt(_as_row, row, row_place(path, number))


def _read_json_lines(path: Path) -> Rows:
    """Yield line number and row of a file of JSON lines, unpacked as it is read; a bad row as its error."""
    number = 0
    try:
        with open_lines(path) as file:
            for number, _, line in _iterate_lines(file, path):
                yield number, _attempt(parse_line, line, row_place(path, number))
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
        if not is_damage(error):
            raise
        yield number + 1, damaged(path, number, error)


def _iterate_lines(file: BufferedIOBase, path: Path) -> Iterator[tuple[int, int, bytes | UserError]]:
    """Yield number from 1, byte offset and bytes of every line that is not blank.

    At most `MAX_LINE_BYTES` of the file are held at a time.
    """
    offset = 0
    for number in count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        start, offset = offset, offset + len(line)
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
                offset += len(line)
            yield (
                number,
                start,
                UserError(
                    f"{row_place(path, number)}: {TOO_LONG}; expected one object a line, each shorter",
                    code="line_too_long",
                ),
            )
        elif line.strip():
            yield number, start, line


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Return the object that a line of JSON holds."""
    try:
        row = json.loads(_decode(line, where))
    except (ValueError, RecursionError) as error:  # also a number of too many digits, too deep a nesting
        said = getattr(error, "msg", error)  # of a JSONDecodeError, without its place
        raise UserError(
            f"{where}: invalid JSON ({said}); expected one object a line", code="invalid_json", where=where
        ) from error
    return _as_row(row, where)


def _attempt(read: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | UserError:
    """Result of `read`, or the error that it raises; an error in place of its first argument stays."""
    if isinstance(arguments[0], UserError):
        return arguments[0]
    try:
        return read(*arguments)
    except UserError as error:
        return error


def _as_row(value: Any, where: str) -> dict[str, Any]:
    """Return a value that is an object."""
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: expected an object with named fields, got {str(value)[:60]!r}",
            code="not_an_object",
            where=where,
        )
    return value


def _decode(data: bytes, where: str) -> str:
    """Return UTF-8 bytes as text; `where` is what an error calls them."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = f"byte {error.start}" if line == 1 else f"line {line}"
        raise UserError(
            f"{where}: not UTF-8 text ({place}); save the file as UTF-8", code="invalid_text"
        ) from error


def _read_lmdb(path: Path) -> Rows:
    for number, row in enumerate(read_lmdb(path), start=1):
        yield number, _attempt(parse_line, row, row_place(path, number))


def _numbered(read: Callable[[Path], Iterator[dict[str, Any]]]) -> Callable[[Path], Rows]:
    return lambda path: enumerate(read(path), start=1)


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".jsonl.zst": _read_json_lines,
    ".csv": read_csv,
    ".parquet": _numbered(read_parquet),
    ".arrow": _numbered(read_arrow),
}
