"""Tokenised data sets whose rows stay in their JSON-lines file, read and encoded as they are asked for.

Building one reads the file once, checks every row and keeps where each good one stands, so that any example
can be had in any order, as from a set in memory, with 17 bytes of memory for each.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf_data.datasets.tokenized import PROGRESS_ROWS, Example, MismatchedPairs, OnProgress, TokenizedDataset
from rlhf_data.errors import UserError
from rlhf_data.readers.files import (
    Columns,
    OnBadRow,
    first_rows,
    good_rows,
    row_parser,
    unpaired,
)
from rlhf_data.readers.json_lines import iterate_lines, parse_line, row_place
from rlhf_data.records.encode import TokenSequence
from rlhf_data.records.kind import Record
from rlhf_data.records.kto import KTOExample
from rlhf_data.records.preference import PreferencePair
from rlhf_data.records.prompt import PromptExample
from rlhf_data.records.steps import StepExample, StepPair

_Key = tuple[int, int, int]
"""Byte offset, line number, and which of the line's records."""


class JSONLines:
    """The records of a `.jsonl` file, found again by where their lines start.

    Args:
        path: the file.
        kind: name of the record kind.
        columns: the file's name of a column, by its usual name.
        subset_size: rows to read at most.
        on_progress: called with the bytes done and the bytes in all while the file is checked.

    Raises:
        UserError: another kind of file, or one that cannot be read; a bad row; the file changed since it was
            read first (when an item is asked for).
    """

    def __init__(
        self,
        path: str | Path,
        kind: str,
        *,
        columns: Columns | None = None,
        subset_size: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.path = _checked_path(path)
        self._parse = row_parser(kind, columns or {})
        self._subset_size, self._on_progress = subset_size, on_progress or (lambda done, total: None)
        self._offsets, self._lines, self._parts = array("q"), array("q"), array("b")
        self._state = self._file_state()

    def __len__(self) -> int:
        return len(self._offsets)

    def records(self, on_bad_row: OnBadRow, skipped: list[str]) -> Iterator[tuple[_Key, Record]]:
        """Every good record with its key; the progress is reported."""
        return unpaired(first_rows(good_rows(self._rows(), on_bad_row, skipped), self._subset_size))

    def keep(self, key: _Key, item: Any) -> None:
        """Keep where a record stands."""
        for column, value in zip((self._offsets, self._lines, self._parts), key, strict=True):
            column.append(value)

    def item(self, index: int, build: Callable[[Record], Any]) -> Any:
        """Read a record again and build it."""
        if self._file_state() != self._state:
            raise UserError(
                f"data file {self.path} changed while it was in use; put it back, or start again",
                code="file_changed",
            )
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        where = row_place(self.path, self._lines[index])
        return build(self._parse(parse_line(line, where), where)[self._parts[index]])

    def _file_state(self) -> tuple[int, int]:
        try:
            status = os.stat(self.path)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"data file {self.path} cannot be read ({reason}); check the path", code="unreadable_file"
            ) from error
        return status.st_size, status.st_mtime_ns

    def _rows(self) -> Iterator[tuple[tuple[_Key, Record], ...] | UserError]:
        """Yield every line's records with their keys, or what is wrong with it."""
        size = self._state[0]
        with open(self.path, "rb") as file:
            for number, offset, line in iterate_lines(file, self.path):
                if number % PROGRESS_ROWS == 1:
                    self._on_progress(offset, size)
                where = row_place(self.path, number)
                try:
                    if isinstance(line, UserError):
                        raise line
                    records = self._parse(parse_line(line, where), where)
                except UserError as error:
                    yield error
                else:
                    yield tuple(((offset, number, part), record) for part, record in enumerate(records))
        self._on_progress(size, size)


class StreamingDataset(TokenizedDataset[Example]):
    """A data set whose examples are read from a `.jsonl` file.

    Args:
        path: the file; see `JSONLines` for it and the next four.
        tokenizer: as for `TokenizedDataset`, like what follows the next four.
        kind: see there; a subclass has its own.
        columns: see `JSONLines`.
        subset_size: see `JSONLines`.
        on_progress: see `JSONLines`.
        **options: those of `TokenizedDataset` and of the kind's builder.

    Raises:
        UserError: as for `JSONLines` and `TokenizedDataset`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        kind: str = "",
        columns: Columns | None = None,
        subset_size: int | None = None,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> None:
        source = JSONLines(
            path, kind or self.kind, columns=columns, subset_size=subset_size, on_progress=on_progress
        )
        super().__init__(source, tokenizer, kind=kind, **options)


class StreamingSFTDataset(StreamingDataset[TokenSequence], kind="sft"):
    """`SFTDataset` over a file that stays on disk."""


class StreamingPreferenceDataset(StreamingDataset[PreferencePair], kind="preference"):
    """`PreferenceDataset` over a file that stays on disk."""


class StreamingKTODataset(MismatchedPairs, StreamingDataset[KTOExample], kind="kto"):
    """`KTODataset` over a file that stays on disk."""


class StreamingStepDataset(StreamingDataset[StepExample | StepPair], kind="steps"):
    """`StepDataset` over a file that stays on disk."""


class StreamingGRPODataset(StreamingDataset[PromptExample], kind="prompt"):
    """`GRPODataset` over a file that stays on disk."""


def _checked_path(path: str | Path) -> Path:
    name = Path(path).name.lower()
    if name.endswith(".jsonl.gz"):
        raise UserError(
            f"data file {path} is compressed, so its rows can only be read in order; unpack it (gunzip) to "
            "stream it, or read it into memory",
            code="compressed_file",
        )
    if not name.endswith(".jsonl"):
        raise UserError(
            f"data file {path} cannot be streamed; expected .jsonl, read others into memory",
            code="unknown_file_type",
        )
    return Path(path)
