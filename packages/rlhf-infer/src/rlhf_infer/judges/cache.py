"""The replies of a judge, kept in a file."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator
from pathlib import Path

from rlhf_data import UserError, ensure_writable_folder


class JudgeCache:
    """Probabilities by key in a SQLite file, which any number of threads and processes may use.

    `folder`, which is made if missing, holds `judge.sqlite3`.
    """

    def __init__(self, folder: Path) -> None:
        self.path = ensure_writable_folder(folder) / "judge.sqlite3"
        with self._open() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, probability REAL)")

    def read(self, texts: dict[str, str]) -> dict[str, float]:
        """Probabilities by text, where known, of texts by key."""
        find = "SELECT probability FROM replies WHERE key = ?"
        with self._open() as connection:
            rows = {text: connection.execute(find, (key,)).fetchone() for key, text in texts.items()}
        return {text: row[0] for text, row in rows.items() if row is not None}

    def write(self, key: str, probability: float) -> None:
        """Keep a probability."""
        with self._open() as connection:
            connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, probability))

    @contextlib.contextmanager
    def _open(self) -> Generator[sqlite3.Connection, None, None]:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                yield connection
        except sqlite3.Error as error:
            raise UserError(
                f"the judge's cache {self.path} cannot be used: {error}; remove it", code="unusable_cache"
            ) from error
