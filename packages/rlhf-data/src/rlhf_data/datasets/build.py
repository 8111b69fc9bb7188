"""Records become examples: one builder per kind of data, for sets in memory and on disk alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from rlhf_data.datasets.encode import Encoder
from rlhf_data.datasets.examples import KTOExample, PreferencePair, PromptExample, StepExample, StepPair
from rlhf_data.datasets.packing import TokenSequence
from rlhf_data.errors import UserError
from rlhf_data.records.kinds import (
    CompletionRecord,
    ConversationRecord,
    LabelledRecord,
    PreferenceRecord,
    PromptRecord,
    RecordKind,
    StepPairRecord,
    StepwiseRecord,
    TextRecord,
)

Overlong = Literal["truncate", "drop"]
_Item = TypeVar("_Item")


class RowDropped(Exception):
    """A good row that leaves nothing to learn, with the reason."""


class Builder:
    """Turns records into examples.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens of a sequence at most; None for no limit.

    Attributes:
        kind: the records it reads.
        encoder: what encodes their texts.
    """

    kind: RecordKind

    def __init__(self, tokenizer: Any, max_length: int | None) -> None:
        if max_length is not None and max_length < 2:
            raise UserError(f"max_length must be at least 2 tokens, got {max_length}")
        self.encoder = Encoder(tokenizer)
        self.max_length = max_length

    def build(self, record: Any) -> Any:
        """Return the record's example.

        Raises:
            RowDropped: nothing of it is left to learn.
            UserError: it cannot be encoded.
        """
        raise NotImplementedError

    def check_prompt(self, length: int) -> None:
        """Raise `RowDropped` where the prompt leaves no room for a completion."""
        if self.max_length is not None and length >= self.max_length:
            raise RowDropped(f"the prompt alone has {length} tokens, max_length is {self.max_length}")


class SFTBuilder(Builder):
    """Completions, conversations and texts become sequences whose learned tokens are scored."""

    kind = "sft"

    def __init__(self, tokenizer: Any, max_length: int | None, assistant_only_loss: bool) -> None:
        super().__init__(tokenizer, max_length)
        self.assistant_only_loss = assistant_only_loss

    def build(self, record: CompletionRecord | ConversationRecord | TextRecord) -> TokenSequence:
        """Return the sequence, cut at `max_length`."""
        start, mask = 0, None
        if isinstance(record, TextRecord):
            ids = self.encoder.ended_text(record.text)
        elif isinstance(record, ConversationRecord):
            only = self.assistant_only_loss
            ids, mask = self.encoder.conversation(record.messages, record.template, assistant_only=only)
        else:
            [ids], start = self.encoder.completions(record.prompt, [record.completion], record.template)
            self.check_prompt(start)
            mask = self._completion_mask(record)
        sequence = TokenSequence(
            ids[: self.max_length], start, None if mask is None else mask[: self.max_length]
        )
        if not sequence.scored():
            raise RowDropped(f"nothing to learn within the first {len(sequence.input_ids)} tokens")
        return sequence

    def _completion_mask(self, record: CompletionRecord) -> list[bool] | None:
        """What the assistant says, where the completion is messages."""
        if isinstance(record.completion, str) or not self.assistant_only_loss:
            return None
        messages = [*record.prompt, *record.completion]
        return self.encoder.conversation(messages, record.template, assistant_only=True)[1]


class PreferenceBuilder(Builder):
    """Preferences become pairs of sequences whose completions are scored."""

    kind = "preference"

    def __init__(self, tokenizer: Any, max_length: int | None, overlong: Overlong) -> None:
        super().__init__(tokenizer, max_length)
        if overlong not in ("truncate", "drop"):
            raise UserError(f"overlong must be truncate or drop, got {overlong!r}")
        self.overlong = overlong

    def build(self, record: PreferenceRecord) -> PreferencePair:
        """Return the pair, each sequence cut at `max_length`."""
        both, start = self.encoder.completions(
            record.prompt, [record.chosen, record.rejected], record.template
        )
        longest = max(map(len, both))
        if self.overlong == "drop" and self.max_length is not None and longest > self.max_length:
            raise RowDropped(f"{longest} tokens, max_length is {self.max_length}")
        self.check_prompt(start)
        chosen, rejected = (TokenSequence(ids[: self.max_length], start) for ids in both)
        return PreferencePair(chosen, rejected, record.margin or 0.0)


class Labelled(NamedTuple):
    """A completion in full length, and its label."""

    sequence: TokenSequence
    label: bool


class KTOBuilder(Builder):
    """Labelled completions, which become examples together with a neighbour's completion."""

    kind = "kto"

    def build(self, record: LabelledRecord) -> Labelled:
        """Return the sequence in full length and its label."""
        [ids], start = self.encoder.completions(record.prompt, [record.completion], record.template)
        self.check_prompt(start)
        return Labelled(TokenSequence(ids, start), record.label)

    def example(self, own: Labelled, other: Labelled | None) -> KTOExample:
        """Return the example of a completion, with the other's completion after its prompt for the KL."""
        ids, start = own.sequence.input_ids, own.sequence.score_from
        kl_sequence = None
        if other is not None:
            completion = other.sequence.input_ids[other.sequence.score_from :]
            kl_sequence = TokenSequence([*ids[:start], *completion][: self.max_length], start)
        return KTOExample(TokenSequence(ids[: self.max_length], start), own.label, kl_sequence)


def kl_partner(index: int, rows: int, batch_size: int) -> int:
    """Return whose completion follows the prompt of example `index` in its KL sequence.

    Within each batch of neighbours in file order the completions move on by one, the last one to the front,
    as in TRL. A last batch of a single row takes that of the row before, where TRL's takes its own.

    Args:
        index: the example, from 0.
        rows: examples in all, at least 2.
        batch_size: neighbours in a batch, at least 2.
    """
    start = index - index % batch_size
    last = min(start + batch_size, rows) - 1
    return index - 1 if index > start or last == start else last


class StepBuilder(Builder):
    """Solutions become sequences in which the last token of every step is known.

    Steps are encoded one by one, so that a step ends on a token of its own: the separator's last.
    """

    kind = "steps"

    def __init__(self, tokenizer: Any, max_length: int | None, step_separator: str) -> None:
        super().__init__(tokenizer, max_length)
        self.separator = self.encoder.text(step_separator, start=False)
        if not self.separator:
            raise UserError("step_separator has no token; expected a text such as a line break")

    def build(self, record: StepwiseRecord | StepPairRecord) -> StepExample | StepPair:
        """Return the solution or pair, without the steps that end behind `max_length`."""
        prompt = self.encoder.prompt(record.prompt, record.template)
        if isinstance(record, StepwiseRecord):
            return self._solution(prompt, record.completions, record.labels)
        return StepPair(
            self._solution(prompt, record.chosen, record.chosen_labels),
            self._solution(prompt, record.rejected, record.rejected_labels),
        )

    def _solution(self, prompt: list[int], steps: Sequence[str], labels: Sequence[float]) -> StepExample:
        ids, ends = list(prompt), []
        for step in steps:
            longer = [*ids, *self.encoder.text(step, start=False), *self.separator]
            if self.max_length is not None and len(longer) > self.max_length:
                break
            ids = longer
            ends.append(len(ids) - 1)
        if not ends:
            raise RowDropped(f"no step ends within max_length {self.max_length}")
        return StepExample(TokenSequence(ids, len(prompt)), tuple(ends), tuple(labels[: len(ends)]))


class PromptBuilder(Builder):
    """Prompts to complete."""

    kind = "prompt"

    def build(self, record: PromptRecord) -> PromptExample:
        """Return the prompt and its token ids, none of them cut off."""
        ids = self.encoder.prompt(record.prompt, record.template)
        if self.max_length is not None and len(ids) > self.max_length:
            raise RowDropped(f"the prompt has {len(ids)} tokens, the limit is {self.max_length}")
        return PromptExample(record.prompt, tuple(ids), dict(record.columns))
