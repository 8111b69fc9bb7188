"""Rows of an LMDB folder: key the row's number in 8 bytes, big-endian; value a JSON object in UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError

LENGTH_KEY = b"__len__"
"""The key of the number of rows, in decimal digits."""


def row_key(number: int) -> bytes:
    """Return the key of a row, numbered from 0."""
    return number.to_bytes(8, "big")


def open_lmdb(folder: Path) -> Any:
    """Open an LMDB folder to read it; each process must open its own."""
    try:
        import lmdb
    except ModuleNotFoundError as error:
        raise UserError(
            f"data {folder} is an LMDB folder; install the library that reads it: "
            "pip install 'rlhf-data[lmdb]'",
            code="missing_package",
        ) from error
    try:
        # Rows are asked for in a random order, so reading ahead would be wasted.
        return lmdb.open(str(folder), readonly=True, lock=False, readahead=False, meminit=False)
    except lmdb.Error as error:
        raise UserError(
            f"data {folder} is not valid LMDB ({error}); copy it again", code="damaged_file"
        ) from error


def lmdb_length(environment: Any, folder: Path) -> int:
    """Return how many rows an open LMDB folder holds."""
    with environment.begin() as transaction:
        value = transaction.get(LENGTH_KEY)
    if value is None or not bytes(value).isdigit():
        raise UserError(
            f"data {folder} has no number of rows under the key __len__; write it with rlhf-report pack",
            code="damaged_file",
        )
    return int(value)


def read_lmdb(folder: Path) -> Iterator[bytes]:
    """Yield the rows of an LMDB folder as JSON, in order."""
    with open_lmdb(folder) as environment:
        count = lmdb_length(environment, folder)
        with environment.begin() as transaction:
            for number in range(count):
                yield lmdb_row(transaction, number, folder)


def lmdb_row(transaction: Any, number: int, folder: Path) -> bytes:
    """Return a row, by its number from 0, as JSON."""
    value = transaction.get(row_key(number))
    if value is None:
        raise UserError(f"{folder}, row {number + 1}: missing; pack it again", code="missing_row")
    return bytes(value)
