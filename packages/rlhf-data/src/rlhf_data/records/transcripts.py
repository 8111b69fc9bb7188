"""Where the prompt of a conversation ends: transcripts in one text, and lists of messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ASSISTANT_TURN = "\n\nAssistant:"
"""What a turn of the assistant starts with in a transcript `\\n\\nHuman: ...\\n\\nAssistant: ...`."""

Message = dict[str, Any]
"""A chat message: `role`, `content` and whatever else the chat template reads."""

Text = str | list[Message]
"""A plain text or the messages of a conversation."""


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


def split_pair(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Split two conversations with a common beginning into prompt, chosen and rejected completion.

    Transcripts are split at the last turn of the assistant that both start alike; other texts at the last
    white space up to which they agree; message lists after the last message that both share. The prompt is
    empty where nothing is shared.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        shared = chosen[: common_prefix(chosen, rejected)]
        turn = shared.rfind(ASSISTANT_TURN)
        at = turn + len(ASSISTANT_TURN) if turn >= 0 else _last_space(shared)
    else:
        at = common_prefix(chosen, rejected)
    return chosen[:at], chosen[at:], rejected[at:]


def split_last_turn(conversation: Text) -> tuple[Text, Text] | None:
    """Split a conversation before what the assistant says last; None where no turn is the assistant's."""
    if isinstance(conversation, str):
        turn = conversation.rfind(ASSISTANT_TURN)
        at = turn + len(ASSISTANT_TURN) if turn >= 0 else None
    else:
        roles = [message["role"] for message in conversation]
        at = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else None
    return None if at is None else (conversation[:at], conversation[at:])


def is_empty(text: Text) -> bool:
    """Return whether nothing is said: white space only, or messages without content or tool calls."""
    if isinstance(text, str):
        return not text.strip()
    return not any((message.get("content") or "").strip() or message.get("tool_calls") for message in text)


def _last_space(text: str) -> int:
    """Index of the last run of white space, 0 where there is none."""
    match = re.search(r"\s+\S*$", text)
    return match.start() if match else 0
