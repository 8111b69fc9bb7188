"""Rows that are kept as they are made, so that an interrupted evaluation continues where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_data import UserError, finite


class Ledger:
    """A file of rows, each with a key, that only grows.

    The file is made with the first row; without a path the rows are kept in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys that have no row yet, in their order."""
        return [key for key in keys if key not in self.rows]

    def add(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep rows by their keys; they are on the disk when this returns."""
        self.rows.update({key: dict(row) for key, row in rows.items()})
        if self.path is None:
            return
        lines = [json.dumps(finite({"key": key, **row}), ensure_ascii=False) for key, row in rows.items()]
        text = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror or error})", code="unwritable"
            ) from error

    def _read(self, path: Path) -> None:
        try:
            whole, newline, _ = path.read_bytes().rpartition(b"\n")
            os.truncate(path, len(whole) + len(newline))  # the end of a line that was being written
            for line in whole.splitlines():
                row = json.loads(line)
                self.rows[row.pop("key")] = row
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror or error})", code="unreadable_file"
            ) from error
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {len(self.rows) + 1}: not a row of an evaluation; delete the file to start "
                "over",
                code="damaged_file",
                line=len(self.rows) + 1,
            ) from error
