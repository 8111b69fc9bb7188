"""Records of rows that stay on disk, by position: which rows there are, parsed on demand."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from rlhf_data.errors import UserError
from rlhf_data.readers.files import UNPAIRED_ROWS, Columns, OnBadRow, good_rows, row_parser
from rlhf_data.records.kind import Record
from rlhf_data.streaming.rows import WINDOW_BYTES, ShardedRows

_PEEKED = 64
"""Rows that are parsed at the start, to see how many records a row has."""
Records = list[Record] | UserError


class RecordSource(Protocol):
    """Records by position: of one stream, or of a mixture."""

    fingerprint: str
    content: str

    def __len__(self) -> int:
        """Positions of an epoch."""
        ...

    def order(self, epoch: int, *, seed: int | None) -> Sequence[int]:
        """Numbers of the positions of an epoch, as `read` takes them; without a seed as they are on disk."""
        ...

    def read(self, numbers: Sequence[int]) -> list[Records]:
        """The records of each number, none of a blank line, or what is wrong with its row."""
        ...


class RecordStream:
    """Records of a kind in one or several files.

    A position is a row; where the first rows show that a row has two records, as a preference row has for
    "kto", each record has its own position, in the order of `load_records`.

    Args:
        path: see `ShardedRows`.
        kind: name of the record kind.
        columns: the files' name of a column, by its usual name.
        subset_size: the first rows to take; None for all.
        on_progress: called with the bytes done and the bytes in all while a file is looked through.
        window: see `ShardedRows`.

    Attributes:
        fingerprint: names files and settings.
        content: see `ShardedRows`.
        rows: the rows of the files.
        parts: records, and so positions, of a row.

    Raises:
        UserError: see `ShardedRows`; an unknown kind or column.
    """

    def __init__(
        self,
        path: str | Path,
        kind: str,
        *,
        columns: Columns | None = None,
        subset_size: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        window: int = WINDOW_BYTES,
    ) -> None:
        if subset_size is not None and subset_size < 1:
            raise UserError(
                f"subset_size must be at least 1, got {subset_size}", code="invalid_value", key="subset_size"
            )
        self._parse = row_parser(kind, columns or {})
        self.rows = ShardedRows(path, limit=subset_size, on_progress=on_progress, window=window)
        self.content = self.rows.content
        self.fingerprint = json.dumps([self.rows.fingerprint, kind, dict(columns or {}), subset_size])
        self.parts = 1
        peeked = self.read(range(min(_PEEKED, len(self.rows))))
        self.parts = max([1, *(len(found) for found in peeked if not isinstance(found, UserError))])

    def __len__(self) -> int:
        return len(self.rows) * self.parts

    def order(self, epoch: int, *, seed: int | None) -> Sequence[int]:
        """See `RecordSource`."""
        if seed is None:
            return range(len(self))
        if self.parts == 1:
            return self.rows.order(epoch, seed=seed)
        return _PartOrder(self, epoch, seed)

    def read(self, numbers: Sequence[int]) -> list[Records]:
        """See `RecordSource`.

        Raises:
            UserError: a file is damaged, or changed since it was opened.
        """
        places = [self._row_and_part(number) for number in numbers]
        found: list[Records] = []
        for (where, fields), (_, part) in zip(
            self.rows.read([row for row, _ in places]), places, strict=True
        ):
            found.append(fields if isinstance(fields, UserError) else self._records(where, fields, part))
        return found

    def _records(self, where: str, fields: dict[str, Any] | None, part: int) -> Records:
        if fields is None:
            return []
        try:
            records = self._parse(fields, where)
        except UserError as error:
            return error
        # The last part takes whatever a row has beyond what the first rows had.
        return list(records[part : None if part == self.parts - 1 else part + 1])

    def _row_and_part(self, number: int) -> tuple[int, int]:
        """Row and which of its records; of 1000 rows all first ones come before all second ones."""
        if self.parts == 1:
            return number, 0
        block, rest = divmod(number, UNPAIRED_ROWS * self.parts)
        part, row = divmod(rest, min(UNPAIRED_ROWS, len(self.rows) - block * UNPAIRED_ROWS))
        return block * UNPAIRED_ROWS + row, part

    def number_of(self, row: int, part: int) -> int:
        """Return the number of a row's record, as `read` takes it."""
        block, rest = divmod(row, UNPAIRED_ROWS)
        rows = min(UNPAIRED_ROWS, len(self.rows) - block * UNPAIRED_ROWS)
        return block * UNPAIRED_ROWS * self.parts + part * rows + rest


class _PartOrder(Sequence[int]):
    """The order of rows with several records: as many passes over the rows, each with one record of each."""

    def __init__(self, stream: RecordStream, epoch: int, seed: int) -> None:
        self._stream, self._key = stream, f"{seed} {epoch}"
        passes = range(epoch * stream.parts, (epoch + 1) * stream.parts)
        self._passes = [stream.rows.order(number, seed=seed) for number in passes]

    def __len__(self) -> int:
        return len(self._stream)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        number, position = divmod(index, len(self._stream.rows))
        row = self._passes[number][position]
        first = zlib.crc32(f"{self._key} {row}".encode())
        return self._stream.number_of(row, (first + number) % self._stream.parts)


def first_records(source: RecordSource, count: int, on_bad_row: OnBadRow) -> Iterator[Record]:
    """Yield the first good records, as they are on disk.

    Args:
        source: where they are.
        count: number of records, at most.
        on_bad_row: whether a bad row among them is an error.
    """
    numbers = source.order(0, seed=None)
    parts = (numbers[at : at + _PEEKED] for at in range(0, len(numbers), _PEEKED))
    found = (records for part in parts for records in source.read(part))
    return islice((record for records in good_rows(found, on_bad_row, []) for record in records), count)
