"""Texts of prompts and completions, and how messages name a sample."""

from __future__ import annotations

from typing import Any

from rlhf_data import Text

_SHOWN = 40
"""Characters of a completion that are shown in messages."""


def text_of(text: Text) -> str:
    """A plain text as it is; of messages their contents, joined by line breaks, without roles."""
    if isinstance(text, str):
        return text
    return "\n".join(_content(message.get("content")) for message in text)


def sample_name(index: int, completion: Text) -> str:
    """Name of a sample in messages: its index in the batch and the beginning of its completion."""
    text = text_of(completion)
    return f"sample {index} (completion {text if len(text) <= _SHOWN else f'{text[:_SHOWN]}…'!r})"


def _content(content: Any) -> str:
    """Text of a message, whose content may be None, a string, or a list of parts of which some are text."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
