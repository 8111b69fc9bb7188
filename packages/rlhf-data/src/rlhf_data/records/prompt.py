"""The kind "prompt": prompts to complete, with the columns that rewards read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rlhf_data.errors import UserError
from rlhf_data.records.encode import Builder, RowDropped
from rlhf_data.records.kind import Record, RecordKind, Text, is_empty, register
from rlhf_data.records.row import TEMPLATE_COLUMNS, Row
from rlhf_data.records.truncation import Truncation

_CONTEXT = ("story", "context", "passage", "choices")
"""Columns without which a question is not a whole prompt."""


@dataclass(frozen=True, slots=True)
class PromptRecord(Record):
    """A prompt to complete, and the row's other columns."""

    prompt: Text
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def parts(self) -> tuple[Text, list[Text]]:
        """The prompt alone: its other columns are not part of a sequence."""
        return self.prompt, []


class PromptExample(NamedTuple):
    """A prompt to complete.

    Attributes:
        prompt: its text or messages.
        prompt_ids: its token ids, up to where the completion starts.
        columns: the row's other columns.
    """

    prompt: Text
    prompt_ids: tuple[int, ...]
    columns: dict[str, Any]


def _parse(row: Row) -> tuple[Record, ...]:
    """`prompt` and any other columns; GSM8K's question is a prompt, verl's right answer becomes a column.

    Without `prompt`, that of `chosen` and `rejected`, or `messages` up to the assistant's last turn.
    """
    asks = row.has("question", "answer") and not any(map(row.has, _CONTEXT))
    if asks and "prompt" not in row.columns and not row.has("prompt"):
        row = replace(row, columns={**row.columns, "prompt": "question"})
    prompt, completions = _split(row)
    taken = {row.name("prompt"), *TEMPLATE_COLUMNS}
    others = {name: value for name, value in row.values.items() if name not in taken} | completions
    judged = others.get("reward_model")
    if isinstance(judged, Mapping) and judged.get("ground_truth") is not None and not row.has("answer"):
        others["answer"] = judged["ground_truth"]
    return (PromptRecord(prompt, others, **row.common()),)


def _split(row: Row) -> tuple[Text, dict[str, Any]]:
    """The prompt: its own column, what a pair shares, or a conversation up to the assistant's last turn.

    Of a pair, the columns of its completions too, without the prompt that stood in them.
    """
    if row.has("prompt") or "prompt" in row.columns:
        return row.said("prompt"), {}
    completions: dict[str, Any] = {}
    if row.has("chosen", "rejected"):
        prompt, *both = row.pair()
        completions = {
            str(row.name(name)): text for name, text in zip(("chosen", "rejected"), both, strict=True)
        }
    elif row.has("messages"):
        messages = row.messages()[0]
        prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    else:
        raise row.missing("prompt")
    if is_empty(prompt):
        raise UserError(
            f"{row.where}: there is no text before the completion; expected a prompt",
            code="empty_prompt",
            where=row.where,
        )
    return prompt, completions


class PromptBuilder(Builder):
    """Prompts to complete, whole ones only.

    Args:
        tokenizer: see `Builder`.
        max_prompt_length: tokens of a prompt at most, longer ones are left out; None for no limit.
        truncation: "left" or "middle" shortens longer prompts instead; see `Builder`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_prompt_length: int | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        super().__init__(tokenizer, max_prompt_length, truncation)
        if truncation == "right":
            raise UserError(
                "truncation right would cut off what a prompt asks for; set it to left, middle or drop",
                code="invalid_value",
                key="truncation",
            )

    def build(self, record: PromptRecord) -> PromptExample:
        """Return the prompt and its token ids; the end of a prompt is never cut off."""
        ids = self.encoder.prompt(record.prompt, record.template)
        if self.is_too_long(len(ids)):
            return self.build(self.shortened(record, len(ids)))
        if self.max_length is not None and len(ids) > self.max_length:
            raise RowDropped(f"the prompt has {len(ids)} tokens, the limit is {self.max_length}")
        return PromptExample(record.prompt, tuple(ids), dict(record.columns))


register(
    RecordKind(
        "prompt",
        (PromptRecord,),
        ("prompt", "chosen", "rejected", "messages"),
        _parse,
        PromptBuilder,
        (PromptExample,),
    )
)
