"""JSON lines, plain or compressed, and what a place in a data file is called."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError
from rlhf_data.readers.tables import MAX_LINE_BYTES, TOO_LONG

Rows = Iterator[tuple[int, dict[str, Any] | UserError]]
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""How names of files of JSON lines end."""


def row_place(path: str | Path, number: int) -> str:
    """Return what an error message calls a row, such as `stories.jsonl, line 3`."""
    name = Path(path).name.lower()
    one_file = not set("*?") & set(str(path))
    return f"{path}, {'line' if one_file and name.endswith((*JSON_LINES, '.csv')) else 'row'} {number}"


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
                    f"{row_place(path, number)}: {TOO_LONG}; expected one object a line, each shorter",
                    code="line_too_long",
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
        row = json.loads(decode(line, where))
    except (ValueError, RecursionError) as error:  # also a number of too many digits, too deep a nesting
        said = getattr(error, "msg", error)  # of a JSONDecodeError, without its place
        raise UserError(
            f"{where}: invalid JSON ({said}); expected one object a line", code="invalid_json", where=where
        ) from error
    return as_row(row, where)


def read_json_lines(path: Path) -> Rows:
    """Yield line number and row of a file of JSON lines, unpacked as it is read; a bad row as its error."""
    number = 0
    try:
        with open_lines(path) as file:
            for number, _, line in iterate_lines(file, path):
                yield number, attempt(parse_line, line, row_place(path, number))
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
        if not is_damage(error):
            raise
        yield number + 1, damaged(path, number, error)


def open_lines(path: Path) -> BufferedIOBase:
    """Open a file of JSON lines to read its text; `.gz` and `.zst` are unpacked on the way."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.open(path, "rb")
    if name.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))  # pyright: ignore
    return open(path, "rb")


def is_damage(error: BaseException) -> bool:
    """Whether an error comes from what a compressed file holds, and not from the disk."""
    return not isinstance(error, OSError) or isinstance(error, gzip.BadGzipFile) or error.errno is None


def damaged(path: Path, line: int, error: BaseException) -> UserError:
    """What is said of a compressed file that cannot be read behind a line."""
    if isinstance(error, EOFError) or "Truncated" in str(error):
        where = f"data file {path} is cut off after line {line} (its compressed stream has no end)"
        return UserError(f"{where}; copy it again", code="truncated_file")
    kind = "zstd" if path.name.lower().endswith(".zst") else "gzip"
    where = f"data file {path} is not valid {kind} after line {line} ({error})"
    return UserError(f"{where}; copy it again", code="damaged_file")


def attempt(read: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | UserError:
    """What `read` gives, or the error that it raises; an error in place of its first argument stays."""
    if isinstance(arguments[0], UserError):
        return arguments[0]
    try:
        return read(*arguments)
    except UserError as error:
        return error


def decode(data: bytes, where: str) -> str:
    """Return UTF-8 bytes as text; `where` is what an error calls them.

    Raises:
        UserError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = f"byte {error.start}" if line == 1 else f"line {line}"
        raise UserError(f"{where}: not UTF-8 text ({place}); save the file as UTF-8") from error


def as_row(value: Any, where: str) -> dict[str, Any]:
    """Return a value that is an object.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: expected an object with named fields, got {str(value)[:60]!r}",
            code="not_an_object",
            where=where,
        )
    return value
