"""Tokenised examples of rows that stay on disk, parsed and encoded when they are indexed.

A bad row, or one that leaves nothing to learn, is found when it is read: it is an error, or left out and
counted.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from rlhf_data.datasets.tokenized import Convert, Example, MismatchedPairs, OfKind, OnProgress
from rlhf_data.errors import UserError
from rlhf_data.readers.files import Columns, OnBadRow, good_rows
from rlhf_data.records.encode import RowDropped, TokenSequence
from rlhf_data.records.kind import Record, record_kind
from rlhf_data.records.kto import KTOExample
from rlhf_data.records.preference import PreferencePair
from rlhf_data.records.prompt import PromptExample
from rlhf_data.records.steps import StepExample, StepPair
from rlhf_data.streaming.read_ahead import read_ahead
from rlhf_data.streaming.records import RecordSource, RecordStream, first_records

_SHOWN = 5
_TRIED = 64
"""Records of which one is encoded at the start, so that a tokenizer that does not fit is noticed at once."""


class LeftOut:
    """Rows that gave no example, so far: their numbers, and the messages about the first of them."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.messages: list[str] = []

    def clear(self) -> None:
        """Start to count again."""
        self.numbers.clear()
        self.messages.clear()

    def add(self, number: int, message: str) -> None:
        """Count a row, once."""
        if number not in self.numbers:
            self.numbers.add(number)
            if len(self.messages) < _SHOWN:
                self.messages.append(message)


class StreamingDataset(OfKind, Sequence[Example]):
    """A data set whose examples are read from shards, in any order, with few of them in memory.

    `len` counts positions, of which a bad row or one that leaves nothing to learn takes one too. Its order
    depends on the seed, the epoch and the position only, so that resuming needs only the epoch and the
    position, with any number of processes and threads.

    Args:
        source: a path as for `RecordStream`, or the records themselves, also a `DatasetMixture`.
        tokenizer: as for `TokenizedDataset`.
        kind: see there; a subclass has its own.
        columns: see `RecordStream`.
        subset_size: see `RecordStream`.
        on_bad_row: "error" stops when a bad row is read, "skip" leaves it out and counts it.
        convert: see `TokenizedDataset`.
        keep: says of a record whether it takes part; it raises `UserError` for a bad one. Records that do
            not are not counted anywhere.
        **options: those of the kind's builder; and of `RecordStream` `on_progress`.

    Attributes:
        builder: what turns records into examples.
        bad: rows that could not be used and were skipped.
        dropped: rows that left nothing to learn.
        left_out: both by the reason, "bad" and "dropped", and what the source's `left_out` has, if any.

    Raises:
        UserError: see `RecordStream`; a bad row among the first ones.
    """

    def __init__(
        self,
        source: str | Path | RecordSource,
        tokenizer: Any,
        *,
        kind: str = "",
        columns: Columns | None = None,
        subset_size: int | None = None,
        on_bad_row: OnBadRow = "error",
        convert: Convert | None = None,
        keep: Callable[[Record], bool] | None = None,
        **options: Any,
    ) -> None:
        kind = kind or self.kind
        if isinstance(source, str | Path):
            progress: OnProgress | None = options.pop("on_progress", None)
            source = RecordStream(
                source, kind, columns=columns, subset_size=subset_size, on_progress=progress
            )
        self.source: RecordSource = source
        self.on_bad_row: OnBadRow = on_bad_row
        self.bad, self.dropped = LeftOut(), LeftOut()
        self.left_out = {"bad": self.bad, "dropped": self.dropped, **getattr(source, "left_out", {})}
        self._convert, self._keep = convert, keep or (lambda record: True)
        self.builder = record_kind(kind).builder(tokenizer, **options)
        self._own = threading.local()  # tokenizers cannot be shared by threads
        self._own.builder = self.builder
        self.builder.check_count(len(self))
        self._fingerprint = [kind, {name: repr(value) for name, value in options.items()}, repr(convert)]
        self._try_first()
        for found in self.left_out.values():
            found.clear()  # rows that were only looked at have not come yet

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Example]:
        numbers = self.order(0, seed=None)
        for start in range(0, len(numbers), _TRIED):
            for found in self.fetch(numbers[start : start + _TRIED]):
                yield from found

    @overload
    def __getitem__(self, number: int) -> Example: ...

    @overload
    def __getitem__(self, number: slice) -> list[Example]: ...

    def __getitem__(self, number: int | slice) -> Example | list[Example]:
        """Return the example of a number, of a row with several the first; of a slice those that there are.

        Raises:
            IndexError: there is no such number.
            UserError: it has no example.
        """
        if isinstance(number, slice):
            return [each for found in self.fetch(range(len(self))[number]) for each in found]
        if not 0 <= number < len(self):
            raise IndexError(f"example {number} of {len(self)}")
        [found] = self.fetch([number])
        if not found:
            raise UserError(f"row {number} (from 0) has no example", code="row_left_out", row=number)
        return found[0]

    @property
    def fingerprint(self) -> str:
        """A hash over the files, the tokenizer and all settings that examples depend on."""
        tokenizer = self.builder.encoder.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        shape = [backend.to_str() if backend else repr(tokenizer), getattr(tokenizer, "chat_template", None)]
        parts = [self.source.fingerprint, *self._fingerprint, shape, getattr(tokenizer, "eos_token", None)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def content(self) -> str:
        """Fingerprint of the files' contents, independent of where they lie."""
        return self.source.content

    def order(self, epoch: int, *, seed: int | None) -> Sequence[int]:
        """Numbers of the rows of an epoch in their order; without a seed as they are on disk."""
        return self.source.order(epoch, seed=seed)

    def fetch(self, numbers: Sequence[int]) -> list[tuple[Example, ...]]:
        """Return the examples of each number: mostly one, none of a row that is left out.

        May be called from several threads at a time.

        Raises:
            UserError: a bad row, unless bad rows are skipped; a file changed since it was opened.
        """
        builder = self._thread_builder()
        found: list[tuple[Example, ...]] = []
        for number, items in zip(numbers, self._items(numbers, builder), strict=True):
            found.append(tuple(self._example(number, item, builder) for item in items))
        return found

    def steps(
        self,
        size: int,
        *,
        seed: int | None,
        epoch: int = 0,
        position: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
    ) -> Iterator[tuple[int, list[Example]]]:
        """Yield position and examples of each step of an epoch, of which a process takes its share.

        To resume after a step, start at the next one's position, with any number of processes and threads.

        Args:
            size: positions of a step, over all processes.
            seed: seed of the order; None keeps the rows as they are on disk.
            epoch: from 0.
            position: where to start, a multiple of `size` for the same steps as from the beginning.
            rank: number of this process, from 0.
            world_size: number of processes.
            workers: threads that read ahead.
        """
        order = self.order(epoch, seed=seed)
        starts = range(position, len(order), size)
        shares = (order[start : start + size][rank::world_size] for start in starts)
        for start, found in zip(starts, read_ahead(self.fetch, shares, workers=workers), strict=True):
            yield start, [example for examples in found for example in examples]

    def _example(self, number: int, item: Any, builder: Any) -> Example:
        def item_at(at: int) -> Any:
            return item if at == number else self._item(at, builder)

        return builder.example(item_at, number, len(self))

    def _items(self, numbers: Sequence[int], builder: Any) -> Iterator[list[Any]]:
        """Examples that the builder makes of the records of each number."""
        for number, records in zip(numbers, self.source.read(numbers), strict=True):
            built: list[Any] = []
            if isinstance(records, UserError):
                self._skip(number, records)
                records = []
            for record in records:
                try:
                    if self._keep(record):
                        built.append(builder.build(self._convert(record) if self._convert else record))
                except RowDropped as drop:
                    self.dropped.add(number, f"{record.where}: {drop}")
                except UserError as error:
                    said = str(error) if record.where in str(error) else f"{record.where}: {error}"
                    self._skip(number, UserError(said, code=error.code, **error.fields))
            yield built

    def _item(self, number: int, builder: Any) -> Any:
        """The first item of a number that an example takes something of; None if it has none."""
        return next(iter(next(self._items([number], builder))), None)

    def _skip(self, number: int, error: UserError) -> None:
        messages: list[str] = []
        list(good_rows([error], self.on_bad_row, messages))
        for message in messages:
            self.bad.add(number, message)

    def _thread_builder(self) -> Any:
        if not hasattr(self._own, "builder"):
            self._own.builder = copy.deepcopy(self.builder)
        return self._own.builder

    def _try_first(self) -> None:
        for record in list(first_records(self.source, _TRIED, self.on_bad_row)):
            try:
                self.builder.build(self._convert(record) if self._convert else record)
                return
            except RowDropped:
                continue
            except UserError as error:
                if self.on_bad_row == "error":
                    raise UserError(f"{record.where}: {error}", code=error.code, **error.fields) from error


class StreamingSFTDataset(StreamingDataset[TokenSequence], kind="sft"):
    """`SFTDataset` over rows that stay on disk."""


class StreamingPreferenceDataset(StreamingDataset[PreferencePair], kind="preference"):
    """`PreferenceDataset` over rows that stay on disk."""


class StreamingKTODataset(MismatchedPairs, StreamingDataset[KTOExample], kind="kto"):
    """`KTODataset` over rows that stay on disk."""


class StreamingStepDataset(StreamingDataset[StepExample | StepPair], kind="steps"):
    """`StepDataset` over rows that stay on disk."""


class StreamingGRPODataset(StreamingDataset[PromptExample], kind="prompt"):
    """`GRPODataset` over rows that stay on disk."""
