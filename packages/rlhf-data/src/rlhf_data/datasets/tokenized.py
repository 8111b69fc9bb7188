"""Tokenised data sets: records of any kind as examples, in memory.

Every row is checked and encoded once, when a set is built. A row that leaves nothing to learn, such as a
prompt that fills `max_length` by itself, is left out and counted: `dropped` says how many, `drop_messages`
where and why, for the first of them.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar, overload

from rlhf_data.errors import UserError
from rlhf_data.readers.files import OnBadRow, good_rows
from rlhf_data.records.encode import RowDropped, TokenSequence
from rlhf_data.records.kind import Record, record_kind
from rlhf_data.records.kto import KTOBuilder, KTOExample
from rlhf_data.records.preference import PreferencePair
from rlhf_data.records.prompt import PromptExample
from rlhf_data.records.steps import StepExample, StepPair

_LOG = logging.getLogger(__name__)

Example = TypeVar("Example")
OnProgress = Callable[[int, int], None]
Convert = Callable[[Record], Record]
"""Another form of a record, made before it is encoded; see `as_messages`."""
_SHOWN = 5
PROGRESS_ROWS = 64
"""Rows between two reports of progress."""


class OfKind:
    """A data set of one kind of records, which a subclass may fix: `class X(OfKind, kind="kto")`."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str = "") -> None:
        """Name the options of the kind's builder in the signature of the class."""
        super().__init_subclass__()
        if kind:
            cls.kind = kind
            _, first, tokenizer, *_, others = inspect.signature(cls.__init__).parameters.values()
            cls.__signature__ = inspect.Signature([first, tokenizer, *record_kind(kind).options, others])


class TokenizedDataset(OfKind, Sequence[Example], Generic[Example]):
    """A sequence of examples that says what was left out when it was built.

    Args:
        records: records of the kind, whose examples are kept in memory, four bytes a token.
        tokenizer: a Hugging Face tokenizer.
        kind: name of the record kind; a subclass has its own.
        on_bad_row: what happens to a row that cannot be encoded, such as a conversation that the chat
            template refuses: "error" (the default) stops, "skip" leaves it out; its message is in `skipped`.
        on_progress: called with the rows done and the rows in all, now and then and at the end.
        convert: makes another form of a record before it is encoded, such as `as_messages`.
        **options: those of the kind's builder.

    Attributes:
        builder: what turns records into examples.
        dropped: rows that left nothing to learn.
        drop_messages: where and why, for the first of them.
        skipped: a message for every bad row that was skipped.

    Raises:
        UserError: a record cannot be encoded, or there are none left.
    """

    def __init__(
        self,
        records: Sequence[Any],
        tokenizer: Any,
        *,
        kind: str = "",
        on_bad_row: OnBadRow = "error",
        on_progress: OnProgress | None = None,
        convert: Convert | None = None,
        **options: Any,
    ) -> None:
        self.builder = record_kind(kind or self.kind).builder(tokenizer, **options)
        self.convert = convert
        self.dropped = 0
        self.drop_messages: list[str] = []
        self.skipped: list[str] = []
        reported = _reported(records, on_progress or (lambda done, total: None))
        self._items = [
            _over_ids(item, lambda ids: array("i", ids), bytes)  # four bytes a token
            for item in self.build_all(reported, on_bad_row)
        ]
        self.builder.check_count(len(self))

    @cached_property
    def content(self) -> str:
        """A hash of the examples in their order, by which a training sees that they have changed."""
        digest = hashlib.sha256()
        for item in self._items:
            _add_to(digest, item)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._items)

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
        return self.builder.example(self.item, index, len(self))

    def item(self, index: int) -> Any:
        """Return what the builder made of a record, by its index from 0."""
        return _over_ids(self._items[index], list, lambda mask: [bool(entry) for entry in mask])

    def build(self, record: Record) -> Any:
        """Return what the builder makes of a record, converted first where the set converts."""
        return self.builder.build(self.convert(record) if self.convert else record)

    def build_all(self, records: Iterable[Record], on_bad_row: OnBadRow) -> Iterator[Any]:
        """Build every record, yield the items of those that are kept, and count the others.

        Raises:
            UserError: a record cannot be encoded, or none is kept.
        """
        kept = 0
        for built in good_rows(self._attempts(records), on_bad_row, self.skipped):
            kept += 1
            yield built
        if not kept:
            first = (self.drop_messages or self.skipped or ["there is no record"])[0]
            left_out = self.dropped + len(self.skipped)
            raise UserError(
                f"no row is left, {left_out} were left out; the first: {first}", code="no_row_left"
            )
        if moved := self.builder.encoder.moved_starts:
            _LOG.warning(
                "%d of %d prompts have other token ids in front of a completion than alone, because tokens "
                "merge there or the chat template shows both otherwise; learning starts where they part",
                moved,
                kept + self.dropped,
            )

    def _attempts(self, records: Iterable[Record]) -> Iterator[Any]:
        for number, record in enumerate(records, start=1):
            where = record.where or f"record {number}"
            try:
                yield self.build(record)
            except RowDropped as drop:
                self.dropped += 1
                if self.dropped <= _SHOWN:
                    self.drop_messages.append(f"{where}: {drop}")
            except UserError as error:
                yield UserError(f"{where}: {error}", code=error.code, **error.fields)


def _reported(records: Sequence[Any], report: OnProgress) -> Iterator[Record]:
    """Every record; the progress is reported."""
    for done, record in enumerate(records):
        if done % PROGRESS_ROWS == 0:
            report(done, len(records))
        yield record
    report(len(records), len(records))


def _over_ids(item: Any, ids: Callable[[Any], Any], mask: Callable[[Any], Any]) -> Any:
    """Return `item` with every sequence's token ids and mask converted."""
    if isinstance(item, TokenSequence):
        scored = None if item.score_mask is None else mask(item.score_mask)
        return TokenSequence(ids(item.input_ids), item.score_from, scored)
    if isinstance(item, tuple) and _is_nested(item):
        parts = [_over_ids(part, ids, mask) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
    return item


def _is_nested(item: tuple[Any, ...]) -> bool:
    """Whether a tuple holds sequences, or tuples that may hold some."""
    return any(issubclass(kind, TokenSequence | tuple) for kind in set(map(type, item)))


def _add_to(digest: Any, item: Any) -> None:
    """Hash a stored example, whose token ids are arrays."""
    if isinstance(item, TokenSequence):
        digest.update(repr((len(item.input_ids), item.score_from)).encode())
        digest.update(item.input_ids)
        digest.update(b"" if item.score_mask is None else bytes(item.score_mask))
    elif isinstance(item, tuple) and (hasattr(item, "_fields") or _is_nested(item)):
        if not hasattr(item, "_fields"):  # may have any length
            digest.update(repr(len(item)).encode())
        for part in item:
            _add_to(digest, part)
    else:
        digest.update(repr(item).encode())


class SFTDataset(TokenizedDataset[TokenSequence], kind="sft"):
    """Supervised examples: sequences whose learned tokens are scored.

    Of a prompt and its completion the completion is learned, of a conversation what the assistant says, of a
    text all. The options are those of `SFTBuilder` and of `TokenizedDataset`.
    """


class PreferenceDataset(TokenizedDataset[PreferencePair], kind="preference"):
    """Preference pairs: two sequences with one prompt, whose completions are scored.

    The options are those of `PreferenceBuilder` and of `TokenizedDataset`.
    """


class MismatchedPairs:
    """Access to the exchange of completions that estimates KTO's KL."""

    builder: KTOBuilder

    def set_kl_batch_size(self, size: int | None) -> None:
        """See `KTOBuilder.set_kl_batch_size`."""
        self.builder.set_kl_batch_size(size)


class KTODataset(MismatchedPairs, TokenizedDataset[KTOExample], kind="kto"):
    """Completions labelled good or bad; the options are those of `KTOBuilder` and of `TokenizedDataset`."""


class StepDataset(TokenizedDataset[StepExample | StepPair], kind="steps"):
    """Solutions with labelled steps, or pairs of solutions.

    The options are those of `StepBuilder` and of `TokenizedDataset`.
    """


class GRPODataset(TokenizedDataset[PromptExample], kind="prompt"):
    """Prompts to complete, with the row's other columns for the reward functions.

    The options are those of `PromptBuilder` and of `TokenizedDataset`.
    """
