"""Row readers for JSON, JSON lines, CSV and columnar data, with errors that name file, line and problem."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError
from rlhf_data.readers.columnar import read_arrow, read_folder, read_hub, read_parquet

MAX_LINE_BYTES = 10_000_000
"""Longest line of a JSON-lines file; a longer one is rather a file without line ends than an example."""

_TOO_LONG = f"longer than {MAX_LINE_BYTES // 1_000_000} MB"

Rows = Iterator[tuple[int, dict[str, Any] | UserError]]


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
        path: `.jsonl` or `.jsonl.gz` (one object a line; blank lines are skipped), `.csv` (with a header),
            `.parquet`, `.arrow`, `.json` (a list of objects, or an object whose "data" is such a list), a
            folder that the `datasets` library saved or that holds `.arrow` or `.parquet` files, or the name
            of a data set on the Hugging Face hub: `owner/name`, `owner/name:split` (without a split:
            "train") or `owner/name/PART:split`, where PART is a configuration or a folder of the data set
            (needs the `datasets` library). A text in a `.json` list is a prompt.

    Yields:
        The row's number from 1 (`.jsonl` and `.csv`: its line), and the row or what is wrong with it.

    Raises:
        UserError: the file is missing, of an unknown type, without rows, or cannot be read any further.
    """
    empty = True
    try:
        for number, row in _reader(path)(Path(path)):
            empty = False
            yield number, row
    except OSError as error:
        raise UserError(f"data file {path} cannot be read ({error.strerror or error})") from error
    if empty:
        raise UserError(f"data file {path} holds no rows; expected at least one")


def row_place(path: str | Path, number: int) -> str:
    """Return what an error message calls a row, such as `stories.jsonl, line 3`."""
    word = "line" if Path(path).name.lower().endswith((".jsonl", ".jsonl.gz", ".csv")) else "row"
    return f"{path}, {word} {number}"


def iterate_lines(file: BufferedIOBase, path: Path) -> Iterator[tuple[int, int, bytes | UserError]]:
    """Yield number from 1, byte offset and bytes of every line that is not blank.

    Args:
        file: an open file of JSON lines; never is more than `MAX_LINE_BYTES` of it held.
        path: what errors call it.
    """
    offset = 0
    for number in itertools.count(1):
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
                    f"{row_place(path, number)}: {_TOO_LONG}; expected one object a line, each shorter"
                ),
            )
        elif line.strip():
            yield number, start, line


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Return the object that a line of JSON holds.

    Raises:
        UserError: not UTF-8, not JSON, or no object.
    """
    try:
        row = json.loads(_decode(line, where))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: invalid JSON ({error.msg}); expected one object a line") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, too deep a nesting
        raise UserError(f"{where}: invalid JSON ({error}); expected one object a line") from error
    return _as_row(row, where)


def _reader(source: str | Path) -> Callable[[Path], Rows]:
    path, name = Path(source), Path(source).name.lower()
    reader = next((reader for suffix, reader in _READERS.items() if name.endswith(suffix)), None)
    if path.is_dir():
        return _numbered(read_folder)
    if reader is None and not path.exists() and _is_hub_name(str(source)):
        return _numbered(lambda _: read_hub(str(source)))
    if reader is None and path.exists():
        raise UserError(
            f"data file {source}: unknown type {path.suffix!r}, expected {', '.join(_READERS)} or a folder"
        )
    if reader is None or not path.exists():
        raise UserError(f"data file {source} does not exist; check the path")
    return reader


def _is_hub_name(source: str) -> bool:
    """Whether this may name a data set on the hub: no path, and not within a folder that is here."""
    owner, slash, title = source.partition("/")
    return bool(slash and title) and re.fullmatch(r"[\w.-]+", owner) is not None and not Path(owner).exists()


def _read_json(path: Path) -> Rows:
    data = path.read_bytes()
    text = _decode(data, f"data file {path}")
    if not text.strip():
        return
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; name it .jsonl if each line is an object" if error.msg == "Extra data" else ""
        raise UserError(f"{path}, line {error.lineno}: invalid JSON ({error.msg}){hint}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: invalid JSON ({error}); correct the file") from error
    if isinstance(values, dict) and "data" in values:
        values = values["data"]
    if not isinstance(values, list):
        raise UserError(f'{path}: expected a list of objects, or an object with such a list under "data"')
    for number, row in enumerate(values, start=1):
        row = {"prompt": row} if isinstance(row, str) else row
        yield number, _attempt(_as_row, row, row_place(path, number))


def _read_json_lines(path: Path) -> Rows:
    with open(path, "rb") as file:
        yield from _json_lines(file, path)


def _read_gzip_lines(path: Path) -> Rows:
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            for number, row in _json_lines(file, path):
                yield number, row
    except EOFError:
        where = f"data file {path} is cut off after line {number} (its gzip stream has no end)"
        yield number + 1, UserError(f"{where}; copy it again")
    except (gzip.BadGzipFile, zlib.error) as error:
        where = f"data file {path} is not valid gzip after line {number} ({error})"
        yield number + 1, UserError(f"{where}; copy it again")


def _json_lines(file: BufferedIOBase, path: Path) -> Rows:
    for number, _, line in iterate_lines(file, path):
        if isinstance(line, UserError):
            yield number, line
        else:
            yield number, _attempt(parse_line, line, row_place(path, number))


def _read_csv(path: Path) -> Rows:
    csv.field_size_limit(sys.maxsize)  # the default refuses texts longer than 131072 characters
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        while True:
            number = reader.line_num + 1
            where = row_place(path, number)
            try:
                values = next(reader, None)
            except csv.Error as error:
                yield number, UserError(f"{where}: invalid CSV ({error}); check the quotes")
                continue
            if values is None:
                return
            if values and header is None:
                header = _checked_header(values, where)
            elif values:
                yield number, _attempt(_csv_row, header, values, where)


def _checked_header(names: list[str], where: str) -> list[str]:
    names = [name.strip() for name in names]
    if len(set(names)) < len(names):
        raise UserError(f"{where}: the header {names} names a column twice; rename one")
    return names


def _csv_row(header: list[str], values: list[str], where: str) -> dict[str, Any]:
    if len(values) != len(header):
        raise UserError(
            f"{where}: {len(values)} values, expected {len(header)} as in the header; check the quotes"
        )
    if sum(map(len, values)) > MAX_LINE_BYTES:
        raise UserError(f"{where}: {_TOO_LONG}; expected shorter rows, check the quotes")
    for name, value in zip(header, values, strict=True):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}, field {name}: not UTF-8 text; save the file as UTF-8") from error
    return dict(zip(header, values, strict=True))


def _attempt(read: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | UserError:
    try:
        return read(*arguments)
    except UserError as error:
        return error


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = f"byte {error.start}" if line == 1 else f"line {line}"
        raise UserError(f"{where}: not UTF-8 text ({place}); save the file as UTF-8") from error


def _as_row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object with named fields, got {str(value)[:60]!r}")
    return value


def _numbered(read: Callable[[Path], Iterator[dict[str, Any]]]) -> Callable[[Path], Rows]:
    return lambda path: enumerate(read(path), start=1)


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_gzip_lines,
    ".csv": _read_csv,
    ".parquet": _numbered(read_parquet),
    ".arrow": _numbered(read_arrow),
}
