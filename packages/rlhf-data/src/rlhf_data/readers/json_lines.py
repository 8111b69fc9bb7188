"""Files of JSON lines, plain or compressed: how they are opened, and what errors say of them."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from functools import lru_cache
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError

Rows = Iterator[tuple[int, dict[str, Any] | UserError]]
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""How names of files of JSON lines end."""


def row_place(path: str | Path, number: int) -> str:
    """Return what an error message calls a row, such as `stories.jsonl, line 3`."""
    return f"{_place(path)} {number}"


@lru_cache(maxsize=256)
def _place(path: str | Path) -> str:
    """The part of `row_place` that all rows of a file share."""
    name = Path(path).name.lower()
    one_file = not set("*?") & set(str(path))
    return f"{path}, {'line' if one_file and name.endswith((*JSON_LINES, '.csv')) else 'row'}"


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
    """The message for a compressed file that cannot be read after a line."""
    if isinstance(error, EOFError) or "Truncated" in str(error):
        where = f"data file {path} is cut off after line {line} (its compressed stream has no end)"
        return UserError(f"{where}; copy it again", code="truncated_file")
    kind = "zstd" if path.name.lower().endswith(".zst") else "gzip"
    where = f"data file {path} is not valid {kind} after line {line} ({error})"
    return UserError(f"{where}; copy it again", code="damaged_file")
