"""What all tokenised sets share: access by index, the count of what was left out, KTO's mismatched pairs."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

from rlhf_data.datasets.build import Builder, KTOBuilder, Labelled, RowDropped, kl_partner
from rlhf_data.datasets.examples import KTOExample
from rlhf_data.errors import UserError
from rlhf_data.readers.load import OnBadRow, good_rows
from rlhf_data.records.kinds import Record

logger = logging.getLogger(__name__)

Example = TypeVar("Example")
OnProgress = Callable[[int, int], None]
Convert = Callable[[Record], Record]
"""Another form of a record, made before it is encoded; see `as_messages`."""
_Key = TypeVar("_Key")
_SHOWN = 5
PROGRESS_ROWS = 64
"""Rows between two reports of progress."""


class ExampleSet(Sequence[Example], Generic[Example]):
    """A sequence of examples that says what was left out when it was built.

    Attributes:
        dropped: rows that left nothing to learn.
        drop_messages: where and why, for the first of them.
        skipped: a message for every bad row that was skipped.
    """

    def __init__(self, builder: Builder, convert: Convert | None = None) -> None:
        self.builder = builder
        self.convert = convert
        self.dropped = 0
        self.drop_messages: list[str] = []
        self.skipped: list[str] = []

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self.example(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.example(index % len(self))

    def example(self, index: int) -> Example:
        """Return an example by its index from 0."""
        return self.item(index)

    def build(self, record: Record) -> Any:
        """Return what the builder makes of a record, converted first where the set converts."""
        return self.builder.build(self.convert(record) if self.convert else record)

    @abstractmethod
    def item(self, index: int) -> Any:
        """Return what the builder made of a record, by its index from 0."""

    def build_all(
        self, records: Iterable[tuple[_Key, Record]], on_bad_row: OnBadRow
    ) -> Iterator[tuple[_Key, Any]]:
        """Build every record and yield key and item of those that are kept; the others are counted.

        Args:
            records: a key and a record each.
            on_bad_row: whether a record that cannot be encoded is raised or skipped.

        Raises:
            UserError: a record cannot be encoded, or none is kept.
        """
        kept = 0
        for key, item in good_rows(self._attempts(records), on_bad_row, self.skipped):
            kept += 1
            yield key, item
        if not kept:
            first = (self.drop_messages or self.skipped or ["there is no record"])[0]
            left_out = self.dropped + len(self.skipped)
            raise UserError(f"no row is left, {left_out} were left out; the first: {first}")
        if moved := self.builder.encoder.moved_starts:
            logger.warning(
                "%d of %d prompts have other token ids in front of a completion than alone, because tokens "
                "merge there or the chat template shows both otherwise; learning starts where they part",
                moved,
                kept + self.dropped,
            )

    def _attempts(self, records: Iterable[tuple[_Key, Record]]) -> Iterator[tuple[_Key, Any] | UserError]:
        for number, (key, record) in enumerate(records, start=1):
            where = record.where or f"record {number}"
            try:
                yield key, self.build(record)
            except RowDropped as drop:
                self.dropped += 1
                if self.dropped <= _SHOWN:
                    self.drop_messages.append(f"{where}: {drop}")
            except UserError as error:
                yield UserError(f"{where}: {error}")


class KTOSet(ExampleSet[KTOExample]):
    """A set of labelled completions, each with a neighbour's completion for the KL where wanted."""

    builder: KTOBuilder

    def set_kl_batch_size(self, size: int | None) -> None:
        """Choose within how many neighbours completions are exchanged; None for no KL sequences.

        Raises:
            UserError: a size below 2.
        """
        if size is not None and size < 2:
            raise UserError(f"kl_batch_size must be at least 2, got {size}")
        self.kl_batch_size = size

    def check_partners(self) -> None:
        """Refuse a single row where completions are to be exchanged.

        Raises:
            UserError: there is no other completion to exchange.
        """
        if self.kl_batch_size is not None and len(self) < 2:
            raise UserError(
                "there is a single row, and so no completion of another prompt to estimate the KL from; "
                "give more rows, or set kl_estimate to ema"
            )

    def example(self, index: int) -> KTOExample:
        """Return an example by its index from 0."""
        own: Labelled = self.item(index)
        size = self.kl_batch_size
        other = self.item(kl_partner(index, len(self), size)) if size is not None else None
        return self.builder.example(own, other)
