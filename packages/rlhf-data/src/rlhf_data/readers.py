"""Row readers for JSON, JSON lines, CSV and Parquet, with errors that name file, line and problem."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError

Rows = Iterator[tuple[int, dict[str, Any]]]


def read_rows(path: str | Path) -> Rows:
    """Yield the rows of a data file, one at a time.

    Args:
        path: `.jsonl` or `.jsonl.gz` (one object a line; blank lines are skipped), `.csv` (with a header),
            `.parquet`, or `.json` (a list of objects, or an object whose "data" is such a list).

    Yields:
        The row's number from 1 (`.jsonl` and `.csv`: its line) and the row.

    Raises:
        UserError: the file is missing, of an unknown type, cut off, not UTF-8, without rows, or a line is
            no row.
    """
    path = Path(path)
    reader = _READERS[_suffix(path)]
    if not path.exists():
        raise UserError(f"data file {path} does not exist; check the path")
    if path.is_dir():
        raise UserError(f"data file {path} is a folder; name a file in it")
    empty = True
    try:
        for number, row in reader(path):
            empty = False
            yield number, row
    except OSError as error:
        raise UserError(f"data file {path} cannot be read ({error.strerror or error})") from error
    if empty:
        raise UserError(f"data file {path} holds no rows; expected at least one")


def row_place(path: str | Path, number: int) -> str:
    """Return what an error message calls a row, such as `stories.jsonl, line 3`."""
    word = "row" if _suffix(Path(path)) in {".json", ".parquet"} else "line"
    return f"{path}, {word} {number}"


def _suffix(path: Path) -> str:
    suffix = next((suffix for suffix in _READERS if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise UserError(f"data file {path}: unknown type {path.suffix!r}, expected {', '.join(_READERS)}")
    return suffix


def _read_json(path: Path) -> Rows:
    text = _decode(path.read_bytes(), f"data file {path}")
    if not text.strip():
        return
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; name it .jsonl if each line is an object" if error.msg == "Extra data" else ""
        raise UserError(f"{path}, line {error.lineno}: invalid JSON ({error.msg}){hint}") from error
    if isinstance(values, dict) and "data" in values:
        values = values["data"]
    if not isinstance(values, list):
        raise UserError(f'{path}: expected a list of objects, or an object with such a list under "data"')
    for number, row in enumerate(values, start=1):
        yield number, _as_row(row, row_place(path, number))


def _read_json_lines(path: Path) -> Rows:
    with open(path, "rb") as file:
        yield from _json_lines(file, path)


def _read_gzip_lines(path: Path) -> Rows:
    try:
        with gzip.open(path, "rb") as file:
            yield from _json_lines(file, path)
    except EOFError as error:
        raise UserError(f"data file {path} is cut off (its gzip stream has no end); copy it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"data file {path} is not valid gzip ({error}); copy it again") from error


def _json_lines(file: Iterable[bytes], path: Path) -> Rows:
    for number, line in enumerate(file, start=1):
        where = row_place(path, number)
        text = _decode(line, where)
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: invalid JSON ({error.msg}); expected one object a line") from error
        yield number, _as_row(row, where)


def _read_csv(path: Path) -> Rows:
    csv.field_size_limit(sys.maxsize)  # the default refuses stories longer than 131072 characters
    reader = csv.reader(io.StringIO(_decode(path.read_bytes(), f"data file {path}"), newline=""), strict=True)
    header: list[str] | None = None
    while True:
        where = row_place(path, reader.line_num + 1)
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{where}: invalid CSV ({error}); check the quotes") from error
        if values is None:
            return
        if not values:
            continue
        if header is None:
            header = _checked_header(values, where)
            continue
        if len(values) != len(header):
            raise UserError(
                f"{where}: {len(values)} values, expected {len(header)} as in the header; check the quotes"
            )
        yield int(where.rpartition(" ")[2]), dict(zip(header, values, strict=True))


def _checked_header(names: list[str], where: str) -> list[str]:
    names = [name.strip() for name in names]
    if len(set(names)) < len(names):
        raise UserError(f"{where}: the header {names} names a column twice; rename one")
    return names


def _read_parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except pyarrow.ArrowException as error:
        raise UserError(f"data file {path} is not valid Parquet ({error}); copy it again") from error


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error


def _as_row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object with named fields, got {str(value)[:60]!r}")
    return value


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_gzip_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
