"""Transcripts and instructions in plain text become chat messages, for models with a chat template."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from rlhf_data.records.kind import Record
from rlhf_data.records.sft import ConversationRecord, TextRecord
from rlhf_data.records.transcripts import ASSISTANT_TURN, Message, Text

_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_TEXTS = ("completion", "chosen", "rejected")


def as_messages(record: Record) -> Record:
    r"""Return a record with its texts as chat messages, where they are turns of a chat.

    That is a prompt of the form `\n\nHuman: ...\n\nAssistant:`, and the instruction of an Alpaca row
    (`Record.is_chat`). White space around a turn is stripped, because it belongs to the form of transcripts.
    Steps of a solution stay texts. Any other record is returned unchanged.
    """
    if isinstance(record, TextRecord):
        turns = _turns(record.text)
        return record if turns is None else _conversation(record, turns)
    prompt = _prompt(getattr(record, "prompt", None), is_chat=record.is_chat)
    if prompt is None:
        return record
    texts: dict[str, Any] = {
        name: _reply(getattr(record, name)) for name in _TEXTS if isinstance(getattr(record, name, None), str)
    }
    return replace(record, prompt=prompt, **texts)


def _conversation(record: TextRecord, messages: list[Message]) -> Record:
    return ConversationRecord(messages, template=record.template, where=record.where)


def _prompt(prompt: Text | None, *, is_chat: bool) -> list[Message] | None:
    if not isinstance(prompt, str):
        return None
    if is_chat:
        return [{"role": "user", "content": prompt}]
    text = prompt.rstrip()
    return _turns(text.removesuffix(ASSISTANT_TURN)) if text.endswith(ASSISTANT_TURN) else None


def _reply(text: str) -> list[Message]:
    """What the assistant says, and the turns behind it where there are any."""
    messages = _turns(f"Assistant:{text}")
    assert messages is not None
    return messages


def _turns(text: str) -> list[Message] | None:
    """The messages of a transcript; None where the text does not start with a turn."""
    _, *parts = _TURN.split(text)
    if not parts or not _TURN.match(text):
        return None
    return [
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]
