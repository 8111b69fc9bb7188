"""Tokenised sets of examples that stay in their JSON-lines file, read and encoded as they are asked for.

Building one reads the file once, checks every row and keeps where each good one stands, so that any example
can be had in any order, as from a set in memory, with 17 bytes of memory for each.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rlhf_data.datasets.build import (
    Builder,
    KTOBuilder,
    Overlong,
    PreferenceBuilder,
    PromptBuilder,
    SFTBuilder,
    StepBuilder,
)
from rlhf_data.datasets.common import PROGRESS_ROWS, Convert, Example, ExampleSet, KTOSet, OnProgress
from rlhf_data.datasets.examples import KTOExample, PreferencePair, PromptExample, StepExample, StepPair
from rlhf_data.datasets.packing import TokenSequence
from rlhf_data.errors import UserError
from rlhf_data.readers.files import iterate_lines, parse_line, row_place
from rlhf_data.readers.load import OnBadRow, first_rows, good_rows, unpaired
from rlhf_data.records.kinds import Record
from rlhf_data.records.parse import row_parser

_Key = tuple[int, int, int]
"""Byte offset, line number, and which of the line's records."""


class StreamOptions(TypedDict, total=False):
    """How a file is read, see `load_records`.

    Attributes:
        columns: the file's name of a column, by its usual name.
        on_bad_row: "error" (the default) stops at a bad row, "skip" leaves it out; see `skipped`.
        subset_size: rows to read at most.
        on_progress: called with the bytes done and the bytes in all while the file is checked.
        convert: makes another form of a record before it is encoded, such as `as_messages`.
    """

    columns: Mapping[str, str] | None
    on_bad_row: OnBadRow
    subset_size: int | None
    on_progress: OnProgress | None
    convert: Convert | None


class StreamingSet(ExampleSet[Example]):
    """A set whose examples are read from a `.jsonl` file.

    Raises:
        UserError: another kind of file, or one that cannot be read; a bad row; the file changed since the set
            was built (when an example is read).
    """

    def __init__(self, path: str | Path, builder: Builder, **options: Unpack[StreamOptions]) -> None:
        super().__init__(builder, options.get("convert"))
        self.path = _checked_path(path)
        self._parse = row_parser(builder.kind, options.get("columns") or {})
        self._offsets, self._lines, self._parts = array("q"), array("q"), array("b")
        self._state = self._file_state()
        on_bad_row = options.get("on_bad_row", "error")
        rows = good_rows(self._rows(options.get("on_progress")), on_bad_row, self.skipped)
        records = unpaired(first_rows(rows, options.get("subset_size")))
        for (offset, line, part), _ in self.build_all(records, on_bad_row):
            self._offsets.append(offset)
            self._lines.append(line)
            self._parts.append(part)

    def __len__(self) -> int:
        return len(self._offsets)

    def item(self, index: int) -> Any:
        """Return what the builder makes of a record, by its index from 0."""
        if self._file_state() != self._state:
            raise UserError(f"data file {self.path} changed while it was in use; put it back, or start again")
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        where = row_place(self.path, self._lines[index])
        record = self._parse(parse_line(line, where), where)[self._parts[index]]
        return self.build(record)

    def _file_state(self) -> tuple[int, int]:
        try:
            status = os.stat(self.path)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"data file {self.path} cannot be read ({reason}); check the path") from error
        return status.st_size, status.st_mtime_ns

    def _rows(self, on_progress: OnProgress | None) -> Iterator[tuple[tuple[_Key, Record], ...] | UserError]:
        """Yield every line's records with their keys, or what is wrong with it."""
        size = self._state[0]
        with open(self.path, "rb") as file:
            for number, offset, line in iterate_lines(file, self.path):
                if on_progress and number % PROGRESS_ROWS == 1:
                    on_progress(offset, size)
                where = row_place(self.path, number)
                try:
                    if isinstance(line, UserError):
                        raise line
                    records = self._parse(parse_line(line, where), where)
                except UserError as error:
                    yield error
                else:
                    yield tuple(((offset, number, part), record) for part, record in enumerate(records))
        if on_progress:
            on_progress(size, size)


class StreamingSFTDataset(StreamingSet[TokenSequence]):
    """`SFTDataset` over a file that stays on disk.

    Args:
        path: a `.jsonl` file.
        tokenizer: as for `SFTDataset`, like the next two.
        max_length: see there.
        assistant_only_loss: see there.
        **options: see `StreamOptions`.

    Raises:
        UserError: as for `StreamingSet`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        assistant_only_loss: bool = True,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(path, SFTBuilder(tokenizer, max_length, assistant_only_loss), **options)


class StreamingPreferenceDataset(StreamingSet[PreferencePair]):
    """`PreferenceDataset` over a file that stays on disk.

    Args:
        path: a `.jsonl` file.
        tokenizer: as for `PreferenceDataset`, like the next two.
        max_length: see there.
        overlong: see there.
        **options: see `StreamOptions`.

    Raises:
        UserError: as for `StreamingSet`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        overlong: Overlong = "truncate",
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(path, PreferenceBuilder(tokenizer, max_length, overlong), **options)


class StreamingKTODataset(StreamingSet[KTOExample], KTOSet):
    """`KTODataset` over a file that stays on disk.

    Args:
        path: a `.jsonl` file.
        tokenizer: as for `KTODataset`, like the next two.
        max_length: see there.
        kl_batch_size: see there.
        **options: see `StreamOptions`.

    Raises:
        UserError: as for `StreamingSet`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        kl_batch_size: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        self.set_kl_batch_size(kl_batch_size)
        super().__init__(path, KTOBuilder(tokenizer, max_length), **options)
        self.check_partners()


class StreamingStepDataset(StreamingSet[StepExample | StepPair]):
    """`StepDataset` over a file that stays on disk.

    Args:
        path: a `.jsonl` file.
        tokenizer: as for `StepDataset`, like the next two.
        max_length: see there.
        step_separator: see there.
        **options: see `StreamOptions`.

    Raises:
        UserError: as for `StreamingSet`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        step_separator: str = "\n",
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(path, StepBuilder(tokenizer, max_length, step_separator), **options)


class StreamingGRPODataset(StreamingSet[PromptExample]):
    """`GRPODataset` over a file that stays on disk.

    Args:
        path: a `.jsonl` file.
        tokenizer: as for `GRPODataset`, like the next one.
        max_prompt_length: see there.
        **options: see `StreamOptions`.

    Raises:
        UserError: as for `StreamingSet`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        max_prompt_length: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(path, PromptBuilder(tokenizer, max_prompt_length), **options)


def _checked_path(path: str | Path) -> Path:
    name = Path(path).name.lower()
    if name.endswith(".jsonl.gz"):
        raise UserError(
            f"data file {path} is compressed, so its rows can only be read in order; unpack it (gunzip) to "
            "stream it, or read it into memory"
        )
    if not name.endswith(".jsonl"):
        raise UserError(f"data file {path} cannot be streamed; expected .jsonl, read others into memory")
    return Path(path)
