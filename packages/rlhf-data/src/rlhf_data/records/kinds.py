"""Records to learn from: completions, conversations, preferences, labels, steps and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_data.records.transcripts import Message, Text

RecordKind = Literal["sft", "preference", "kto", "steps", "prompt"]
"""What the rows of a file are to become, see `load_records`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What every record knows beside its texts.

    Attributes:
        template: keyword arguments for the chat template, such as `tools`.
        where: the record's place in its file; not compared.
        is_chat: whether its texts are turns of a chat, as an instruction and its answer are; see
            `as_messages`.
    """

    template: Mapping[str, Any] | None = field(default=None, hash=False)
    where: str = field(default="", compare=False)
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class CompletionRecord(Record):
    """A prompt and the completion to learn; both texts or both messages."""

    prompt: Text
    completion: Text


@dataclass(frozen=True, slots=True)
class ConversationRecord(Record):
    """A whole conversation, of which the assistant's messages are to be learned."""

    messages: list[Message]


@dataclass(frozen=True, slots=True)
class TextRecord(Record):
    """A text that is learned from its first token to its last."""

    text: str


@dataclass(frozen=True, slots=True)
class PreferenceRecord(Record):
    """Two completions of one prompt, `chosen` the better by `margin` (None: nobody said by how much)."""

    prompt: Text
    chosen: Text
    rejected: Text
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class LabelledRecord(Record):
    """A prompt and a completion that is desirable (`label` true) or not."""

    prompt: Text
    completion: Text
    label: bool


@dataclass(frozen=True, slots=True)
class StepwiseRecord(Record):
    """A prompt and the steps of one solution, each with a label in [0, 1]: 1 for a right step."""

    prompt: Text
    completions: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepPairRecord(Record):
    """A prompt and the steps of two solutions, `chosen` with the better outcome; step labels are optional."""

    prompt: Text
    chosen: tuple[str, ...]
    rejected: tuple[str, ...]
    chosen_labels: tuple[float, ...] = ()
    rejected_labels: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRecord(Record):
    """A prompt to complete, and the row's other columns."""

    prompt: Text
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
