"""The kind "kto": completions labelled good or bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf_data.errors import UserError
from rlhf_data.records.encode import Builder, TokenSequence
from rlhf_data.records.kind import Record, RecordKind, Text, register
from rlhf_data.records.row import Row
from rlhf_data.records.truncation import Truncation


@dataclass(frozen=True, slots=True)
class LabelledRecord(Record):
    """A prompt and a completion that is desirable (`label` true) or not."""

    prompt: Text
    completion: Text
    label: bool


class KTOExample(NamedTuple):
    """One completion that is labelled good or bad.

    Attributes:
        sequence: prompt and completion; the completion's tokens are scored.
        label: True for a desirable completion.
        kl_sequence: the same prompt with another row's completion, from which the KL is estimated; None
            where the estimate needs no such pair.
        ref_logps: log π_ref(completion | prompt), where known.
        ref_kl_logps: the same for the completion of `kl_sequence`.
    """

    sequence: TokenSequence
    label: bool
    kl_sequence: TokenSequence | None = None
    ref_logps: float | None = None
    ref_kl_logps: float | None = None


class Labelled(NamedTuple):
    """A completion in full length, and its label."""

    sequence: TokenSequence
    label: bool


def _parse(row: Row) -> tuple[Record, ...]:
    """`prompt, completion, label`, or a preference row, which becomes two records."""
    common = row.common()
    if row.has("chosen", "rejected") and not row.has("completion"):
        prompt, chosen, rejected = row.pair()
        return (
            LabelledRecord(prompt, chosen, True, **common),
            LabelledRecord(prompt, rejected, False, **common),
        )
    prompt, completion = row.prompt_and_completion()
    return (LabelledRecord(prompt, completion, row.label("label"), **common),)


class KTOBuilder(Builder):
    """Labelled completions become examples, each with a neighbour's completion for the KL if wanted.

    Args:
        tokenizer: see `Builder`.
        max_length: tokens of a sequence at most, longer ones are cut at their end; None for no limit.
        kl_batch_size: neighbours among which prompts and completions are mismatched for the KL (see
            `kl_partner`), in TRL `per_device_train_batch_size`; None for examples without `kl_sequence`.
        truncation: see `Builder`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        kl_batch_size: int | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        super().__init__(tokenizer, max_length, truncation)
        self.set_kl_batch_size(kl_batch_size)

    def set_kl_batch_size(self, size: int | None) -> None:
        """Set the number of neighbours among which completions are exchanged; None for no KL sequences."""
        if size is not None and size < 2:
            raise UserError(
                f"kl_batch_size must be at least 2, got {size}", code="invalid_value", key="kl_batch_size"
            )
        self.kl_batch_size = size

    def build(self, record: LabelledRecord) -> Labelled:
        """Return the sequence in full length and its label."""
        [ids], start = self.encoder.completions(*record.parts(), record.template)
        if self.is_too_long(len(ids)):
            return self.build(self.shortened(record, len(ids)))
        self.check_prompt(start)
        return Labelled(TokenSequence(ids, start), record.label)

    def check_count(self, count: int) -> None:
        """Refuse a single row if completions are to be exchanged."""
        if self.kl_batch_size is not None and count < 2:
            raise UserError(
                "there is a single row, and so no completion of another prompt to estimate the KL from; "
                "give more rows, or set kl_estimate to ema",
                code="too_few_rows",
            )

    def example(self, item: Callable[[int], Labelled], index: int, count: int) -> KTOExample:
        """Return a completion's example, with its partner's completion after its prompt for the KL."""
        own = item(index)
        ids, start = own.sequence.input_ids, own.sequence.score_from
        kl_sequence = None
        if self.kl_batch_size is not None:
            # A row that stays on disk may turn out to be bad: then the one before it takes its place.
            at = kl_partner(index, count, self.kl_batch_size)
            candidates = (item((at - back) % count) for back in range(count) if (at - back) % count != index)
            other = next((found for found in candidates if found is not None), None)
            if other is not None:
                completion = other.sequence.input_ids[other.sequence.score_from :]
                kl_sequence = TokenSequence([*ids[:start], *completion][: self.max_length], start)
        return KTOExample(TokenSequence(ids[: self.max_length], start), own.label, kl_sequence)


def kl_partner(index: int, rows: int, batch_size: int) -> int:
    """Return whose completion follows the prompt of example `index` (from 0) in its KL sequence.

    Within each batch of neighbours in file order (2 or more) the completions are rotated by one, as in TRL. A
    last batch of a single row takes the completion of the row before, where TRL's takes its own.
    """
    start = index - index % batch_size
    last = min(start + batch_size, rows) - 1
    return index - 1 if index > start or last == start else last


register(
    RecordKind(
        "kto",
        (LabelledRecord,),
        ("prompt", "messages", "completion", "label", "chosen", "rejected"),
        _parse,
        KTOBuilder,
        (KTOExample,),
    )
)
