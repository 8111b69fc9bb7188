"""Tokenised sets of examples in memory: every row is checked and encoded once, when the set is built.

A row that leaves nothing to learn, such as a prompt that fills `max_length` by itself, is left out and
counted: `dropped` says how many, `drop_messages` where and why, for the first of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
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
from rlhf_data.readers.load import OnBadRow


class BuildOptions(TypedDict, total=False):
    """How a set is built from records.

    Attributes:
        on_bad_row: what happens to a row that cannot be encoded, such as a conversation that the chat
            template refuses: "error" (the default) stops, "skip" leaves it out; its message is in `skipped`.
        on_progress: called with the rows done and the rows in all, now and then and at the end.
        convert: makes another form of a record before it is encoded, such as `as_messages`.
    """

    on_bad_row: OnBadRow
    on_progress: OnProgress | None
    convert: Convert | None


class InMemorySet(ExampleSet[Example]):
    """A set whose examples are kept in memory, four bytes a token."""

    def __init__(self, records: Sequence[Any], builder: Builder, **options: Unpack[BuildOptions]) -> None:
        super().__init__(builder, options.get("convert"))
        counted = _counted(records, options.get("on_progress"))
        built = self.build_all(enumerate(counted), options.get("on_bad_row", "error"))
        self._items = [_over_ids(item, _packed_ids, bytes) for _, item in built]

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> Any:
        """Return what the builder made of a record, by its index from 0."""
        return _over_ids(self._items[index], list, lambda mask: [bool(entry) for entry in mask])


class SFTDataset(InMemorySet[TokenSequence]):
    """Supervised examples: sequences whose learned tokens are scored.

    Of a prompt and its completion the completion is learned, of a conversation what the assistant says, of a
    text all.

    Args:
        records: `CompletionRecord`, `ConversationRecord` or `TextRecord`.
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens of a sequence at most, longer ones are cut at their end; None for no limit.
        assistant_only_loss: whether only the assistant's messages of a conversation are learned; otherwise
            all of it is.
        **options: see `BuildOptions`.

    Raises:
        UserError: a record cannot be encoded, or none is left.
    """

    def __init__(
        self,
        records: Sequence[Any],
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        assistant_only_loss: bool = True,
        **options: Unpack[BuildOptions],
    ) -> None:
        super().__init__(records, SFTBuilder(tokenizer, max_length, assistant_only_loss), **options)


class PreferenceDataset(InMemorySet[PreferencePair]):
    """Preference pairs: two sequences with one prompt, whose completions are scored.

    Args:
        records: `PreferenceRecord`.
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens of a sequence at most; None for no limit.
        overlong: "truncate" cuts longer sequences at their end (as TRL's DPO), "drop" leaves their pairs out
            (as TRL's reward training).
        **options: see `BuildOptions`.

    Raises:
        UserError: a record cannot be encoded, or none is left.
    """

    def __init__(
        self,
        records: Sequence[Any],
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        overlong: Overlong = "truncate",
        **options: Unpack[BuildOptions],
    ) -> None:
        super().__init__(records, PreferenceBuilder(tokenizer, max_length, overlong), **options)


class KTODataset(InMemorySet[KTOExample], KTOSet):
    """Completions labelled good or bad.

    Args:
        records: `LabelledRecord`.
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens of a sequence at most, longer ones are cut at their end; None for no limit.
        kl_batch_size: neighbours among which prompts and completions are mismatched for the KL (see
            `kl_partner`), in TRL `per_device_train_batch_size`; None for examples without `kl_sequence`.
        **options: see `BuildOptions`.

    Raises:
        UserError: a record cannot be encoded, or none is left.
    """

    def __init__(
        self,
        records: Sequence[Any],
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        kl_batch_size: int | None = None,
        **options: Unpack[BuildOptions],
    ) -> None:
        self.set_kl_batch_size(kl_batch_size)
        super().__init__(records, KTOBuilder(tokenizer, max_length), **options)
        self.check_partners()


class StepDataset(InMemorySet[StepExample | StepPair]):
    """Solutions with labelled steps, or pairs of solutions.

    Args:
        records: `StepwiseRecord`, which become `StepExample`, or `StepPairRecord`, which become `StepPair`.
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens of a sequence at most; steps that end behind it are left out. None for no limit.
        step_separator: text that ends every step; its last token is where the step is judged.
        **options: see `BuildOptions`.

    Raises:
        UserError: a record cannot be encoded, or none is left.
    """

    def __init__(
        self,
        records: Sequence[Any],
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        step_separator: str = "\n",
        **options: Unpack[BuildOptions],
    ) -> None:
        super().__init__(records, StepBuilder(tokenizer, max_length, step_separator), **options)


class GRPODataset(InMemorySet[PromptExample]):
    """Prompts to complete, with the row's other columns for the reward functions.

    Args:
        records: `PromptRecord`.
        tokenizer: a Hugging Face tokenizer.
        max_prompt_length: tokens of a prompt at most, longer ones are left out; None for no limit.
        **options: see `BuildOptions`.

    Raises:
        UserError: a record cannot be encoded, or none is left.
    """

    def __init__(
        self,
        records: Sequence[Any],
        tokenizer: Any,
        *,
        max_prompt_length: int | None = None,
        **options: Unpack[BuildOptions],
    ) -> None:
        super().__init__(records, PromptBuilder(tokenizer, max_prompt_length), **options)


def _counted(records: Sequence[Any], on_progress: OnProgress | None) -> Iterator[Any]:
    for done, record in enumerate(records):
        if on_progress and done % PROGRESS_ROWS == 0:
            on_progress(done, len(records))
        yield record
    if on_progress:
        on_progress(len(records), len(records))


def _packed_ids(ids: Sequence[int]) -> array[int]:
    return array("i", ids)


def _over_ids(item: Any, ids: Callable[[Any], Any], mask: Callable[[Any], Any]) -> Any:
    """Return `item` with every sequence's token ids and mask converted."""
    if isinstance(item, TokenSequence):
        scored = None if item.score_mask is None else mask(item.score_mask)
        return TokenSequence(ids(item.input_ids), item.score_from, scored)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_over_ids(part, ids, mask) for part in item))
    return item
