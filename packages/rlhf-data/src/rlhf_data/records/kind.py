"""Records: their texts and messages, and the registry of record kinds, each in a module of this package."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf_data.errors import UserError

if TYPE_CHECKING:
    from rlhf_data.records.encode import Builder
    from rlhf_data.records.row import Row

Message = dict[str, Any]
"""A chat message: `role`, `content` and whatever else the chat template reads."""

Text = str | list[Message]
"""A plain text or the messages of a conversation."""

ASSISTANT_TURN = "\n\nAssistant:"
"""Start of a turn of the assistant in a transcript `\\n\\nHuman: ...\\n\\nAssistant: ...`."""
_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Fields common to all records.

    Attributes:
        replies: names of the fields with completions, in their order; a class has those that it declares.
        template: keyword arguments for the chat template, such as `tools`.
        where: the record's place in its file; not compared.
        is_chat: whether its texts are turns of a chat, as an instruction and its answer are; false for
            messages, which say so themselves.
    """

    replies: ClassVar[tuple[str, ...]] = ("completion", "chosen", "rejected")
    template: Mapping[str, Any] | None = field(default=None, hash=False)
    where: str = field(default="", compare=False)
    is_chat: bool = False

    def parts(self) -> tuple[Text, list[Text]]:
        """The prompt, and the completions that may follow it."""
        prompt: Text = getattr(self, "prompt", "")
        return prompt, [getattr(self, name) for name in self.replies if hasattr(self, name)]

    def with_prompt(self, prompt: Text) -> Record:
        """The record with another prompt before its completions."""
        return replace(self, prompt=prompt)  # pyright: ignore[reportCallIssue]

    def as_messages(self) -> Record:
        r"""The record with its texts as chat messages, where they are turns of a chat; otherwise itself.

        That is a prompt of the form `\n\nHuman: ...\n\nAssistant:`, and the instruction of an Alpaca row
        (`is_chat`). White space around a turn is stripped, because it belongs to the form of transcripts.
        Steps of a solution stay texts.
        """
        text = getattr(self, "prompt", None)
        if not isinstance(text, str):
            return self
        transcript = text.rstrip()
        prompt = None
        if transcript.endswith(ASSISTANT_TURN):
            prompt = turns(transcript.removesuffix(ASSISTANT_TURN))
        if prompt is None and self.is_chat:
            prompt = [{"role": "user", "content": text}]
        if prompt is None:
            return self
        # The assistant's turn, and the turns after it if there are any.
        replies: dict[str, Any] = {
            name: turns(f"Assistant:{said}")
            for name in self.replies
            if isinstance(said := getattr(self, name, None), str)
        }
        return replace(self, prompt=prompt, **replies)  # pyright: ignore[reportCallIssue]


@dataclass(frozen=True)
class RecordKind:
    """A kind of record: how rows are read, and how records become examples.

    Args:
        name: what `load_records`, `Method.records` and error messages call it.
        records: the classes of its records.
        columns: what a row may have, in addition to `tools` and `chat_template_kwargs`.
        parse: turns a row into its records; raises `UserError` for a bad row, naming the field.
        builder: turns records into examples; its keyword arguments are the options of the data sets.
        examples: the classes of its examples.
    """

    name: str
    records: tuple[type[Record], ...]
    columns: tuple[str, ...]
    parse: Callable[[Row], tuple[Record, ...]]
    builder: Callable[..., Builder]
    examples: tuple[type, ...]

    @property
    def options(self) -> tuple[inspect.Parameter, ...]:
        """The builder's keyword arguments."""
        parameters = inspect.signature(self.builder).parameters.values()
        return tuple(each for each in parameters if each.kind is each.KEYWORD_ONLY)


RECORD_KINDS: dict[str, RecordKind] = {}
"""The kinds by name, complete after the first `record_kind`; `register` adds one."""


def register(kind: RecordKind) -> None:
    """Make a kind known to readers, data sets and training methods."""
    RECORD_KINDS[kind.name] = kind


def record_kind(name: str) -> RecordKind:
    """Return a kind by its name.

    Raises:
        UserError: no kind of that name is registered.
    """
    package = importlib.import_module("rlhf_data.records")
    for module in pkgutil.iter_modules(package.__path__, "rlhf_data.records."):
        importlib.import_module(module.name)
    if name not in RECORD_KINDS:
        raise UserError(
            f"kind of records must be one of {', '.join(sorted(RECORD_KINDS))}, got {name!r}",
            code="unknown_kind",
        )
    return RECORD_KINDS[name]


def prompt_key(record: Record) -> str:
    """Key shared by all records of the same prompt, as JSON; without a prompt, the whole record."""
    for name in ("prompt", "messages", "text"):
        if hasattr(record, name):
            return json.dumps(getattr(record, name), sort_keys=True)
    raise TypeError(f"{type(record).__name__} has neither prompt nor messages nor text")


def is_held_out(record: Record, fraction: float) -> bool:
    """Whether a hash of a record's prompt puts it among the held-out fraction of prompts."""
    digest = hashlib.sha256(prompt_key(record).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def as_messages(record: Record) -> Record:
    """See `Record.as_messages`."""
    return record.as_messages()


def as_completion(prompt: Text, text: str) -> Text:
    """A completion in the form of its prompt: a text after a text, after messages the assistant's message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def turns(text: str) -> list[Message] | None:
    """The messages of a transcript; None if the text does not start with a turn."""
    _, *parts = _TURN.split(text)
    if not parts or not _TURN.match(text):
        return None
    return [
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def is_empty(text: Text) -> bool:
    """Return whether a text is empty: white space only, or messages without content or tool calls."""
    if isinstance(text, str):
        return not text.strip()
    return not any((message.get("content") or "").strip() or message.get("tool_calls") for message in text)


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many leading items (characters, tokens, messages) two sequences have in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
