"""The kind "sft": completions, conversations and texts to imitate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlhf_data.errors import UserError
from rlhf_data.records.encode import Builder, RowDropped, TokenSequence
from rlhf_data.records.kind import Message, Record, RecordKind, Text, is_empty, register, turns
from rlhf_data.records.row import Row, split_last_turn
from rlhf_data.records.truncation import Truncation


@dataclass(frozen=True, slots=True)
class CompletionRecord(Record):
    """A prompt and the completion to learn; both texts or both messages."""

    prompt: Text
    completion: Text


@dataclass(frozen=True, slots=True)
class ConversationRecord(Record):
    """A whole conversation, of which the assistant's messages are learned."""

    messages: list[Message]

    def parts(self) -> tuple[Text, list[Text]]:
        """Everything before the assistant's last turn, and that turn with what follows."""
        prompt, reply = split_last_turn(self.messages) or (self.messages, [])
        return prompt, [reply]

    def with_prompt(self, prompt: Text) -> Record:
        """The assistant's last turn after another beginning."""
        return replace(self, messages=[*prompt, *self.parts()[1][0]])


@dataclass(frozen=True, slots=True)
class TextRecord(Record):
    """A text that is learned from its first token to its last."""

    text: str

    def parts(self) -> tuple[Text, list[Text]]:
        """A transcript up to the assistant's last turn, and that turn; any other text, and nothing."""
        prompt, reply = split_last_turn(self.text) or (self.text, "")
        return prompt, [reply]

    def with_prompt(self, prompt: Text) -> Record:
        """The assistant's last turn after another prompt; a text without turns becomes that prompt."""
        return replace(self, text=f"{prompt}{self.parts()[1][0]}")

    def as_messages(self) -> Record:
        """The conversation, where the text is a transcript."""
        messages = turns(self.text)
        if messages is None:
            return self
        return ConversationRecord(messages, template=self.template, where=self.where)


def _parse(row: Row) -> tuple[Record, ...]:
    """`prompt, completion`, `messages`, `text`, or a preference row, whose chosen completion is taken."""
    if not row.has("prompt", "completion"):
        if row.has("messages"):
            messages, where = row.messages()
            if all(message["role"] != "assistant" or is_empty([message]) for message in messages):
                raise UserError(
                    f"{where}: expected at least one message that the assistant says",
                    code="no_assistant_turn",
                )
            return (ConversationRecord(messages, **row.common()),)
        if row.has("text"):
            text = row.said("text")
            if not isinstance(text, str):
                raise UserError(
                    f"{row.get('text')[1]}: expected a text, got messages; name the column messages",
                    code="invalid_value",
                )
            return (TextRecord(text, **row.common()),)
        if row.has("chosen", "rejected"):
            return (CompletionRecord(*row.pair()[:2], **row.common()),)
    return (CompletionRecord(*row.prompt_and_completion(), **row.common()),)


class SFTBuilder(Builder):
    """Completions, conversations and texts become sequences whose learned tokens are scored.

    Args:
        tokenizer: see `Builder`.
        max_length: tokens of a sequence at most, longer ones are cut at their end; None for no limit.
        assistant_only_loss: whether only the assistant's messages of a conversation are learned; otherwise
            all of it is.
        truncation: see `Builder`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        assistant_only_loss: bool = True,
        truncation: Truncation | None = None,
    ) -> None:
        super().__init__(tokenizer, max_length, truncation)
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
            [ids], start = self.encoder.completions(*record.parts(), record.template)
        if self.is_too_long(len(ids)):
            return self.build(self.shortened(record, len(ids)))
        if isinstance(record, CompletionRecord):
            self.check_prompt(start)
            mask = self._completion_mask(record)
        sequence = TokenSequence(
            ids[: self.max_length], start, None if mask is None else mask[: self.max_length]
        )
        if not sequence.scored():
            raise RowDropped(f"nothing to learn within the first {len(sequence.input_ids)} tokens")
        return sequence

    def _completion_mask(self, record: CompletionRecord) -> list[bool] | None:
        """Mask of the assistant's tokens, where the completion is messages and only those are learned."""
        if isinstance(record.completion, str) or not self.assistant_only_loss:
            return None
        messages = [*record.prompt, *record.completion]
        return self.encoder.conversation(messages, record.template, assistant_only=True)[1]


register(
    RecordKind(
        "sft",
        (CompletionRecord, ConversationRecord, TextRecord),
        ("prompt", "completion", "messages", "text", "chosen", "rejected"),
        _parse,
        SFTBuilder,
        (TokenSequence,),
    )
)
