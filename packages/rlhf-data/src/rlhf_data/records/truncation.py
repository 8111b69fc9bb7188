"""Prompts too long for their limit, cut by whole turns, so that completions stay whole."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rlhf_data.records.kind import Text

Truncation = Literal["left", "right", "middle", "drop"]
"""How rows that are too long become shorter: see `shorten_prompt`; "right" cuts sequences at their end."""
_HUMAN_TURN = re.compile(r"(?:\A|\n\n)Human:")
_WORD = re.compile(r"\S+")


def shorten_prompt(
    prompt: Text,
    fits: Callable[[Text], bool],
    *,
    keep: Literal["left", "middle"],
    borders: Callable[[str], Sequence[int]],
) -> Text | None:
    r"""Return the prompt with as little taken out as lets it fit, or None if nothing helps.

    Turns go first, from a user's up to the next user's, so that what is left starts with a user's; what
    comes before the first of them, such as a system message, stays. "left" takes them from the start,
    "middle" keeps the first exchange too, where that is possible. Where the last user's turn alone is too
    long, its text is cut on token borders: at its start, or in its middle. A text without turns is one.

    Args:
        prompt: text, transcript (`\n\nHuman: ...\n\nAssistant:`) or messages.
        fits: whether a prompt is short enough; what is shorter than one that fits must fit.
        keep: "left" or "middle".
        borders: indices in a text at which a token starts, ascending.
    """
    if fits(prompt):
        return prompt
    starts = _user_turns(prompt)
    if len(starts) > 1:
        kept = [starts[1]] if keep == "middle" else []
        for head in (*kept, starts[0]):
            found = _behind(prompt, head, starts[bisect_right(starts, head) :], fits)
            if found is not None:
                return found
    start = starts[-1] if starts else 0
    return _shorten_turn(prompt[: starts[0] if starts else 0], prompt[start:], fits, keep, borders)


def token_borders(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return the function that finds the indices in a text at which a token of this tokenizer starts.

    Words take the place of tokens where the tokenizer is not a fast one, and without one.
    """

    def borders(text: str) -> list[int]:
        if not getattr(tokenizer, "is_fast", False):
            return [match.start() for match in _WORD.finditer(text)]
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return sorted({start for start, end in encoded["offset_mapping"] if end > start})

    return borders


def _user_turns(prompt: Text) -> list[int]:
    """Where each turn of the user starts: the character in a transcript, the index of a message."""
    if isinstance(prompt, str):
        return [match.start() for match in _HUMAN_TURN.finditer(prompt)]
    return [index for index, message in enumerate(prompt) if message["role"] == "user"]


def _behind(prompt: Any, head: int, starts: list[int], fits: Callable[[Text], bool]) -> Text | None:
    """The first `head` of the prompt, and everything from the earliest of these turns on that lets it fit."""
    return _first(len(starts), lambda number: prompt[:head] + prompt[starts[number] :], fits)


def _first(count: int, candidate: Callable[[int], Text], fits: Callable[[Text], bool]) -> Text | None:
    """The first candidate that fits; each is shorter than the one before."""
    index = bisect_left(range(count), True, key=lambda number: fits(candidate(number)))
    return candidate(index) if index < count else None


def _shorten_turn(
    head: Any,
    rest: Any,
    fits: Callable[[Text], bool],
    keep: Literal["left", "middle"],
    borders: Callable[[str], Sequence[int]],
) -> Text | None:
    """The text before all turns, and the last user's turn with its text cut; None if that is too long."""
    if isinstance(rest, str):
        opening = match.end() if (match := _HUMAN_TURN.match(rest)) else 0
        closing = rest.find("\n\nAssistant:", opening)
        closing = closing if closing >= 0 else len(rest)
        content = rest[opening:closing]

        def whole(text: str) -> Text:
            return head + rest[:opening] + text + rest[closing:]
    elif rest and isinstance(content := rest[0].get("content"), str):

        def whole(text: str) -> Text:
            return [*head, {**rest[0], "content": text}, *rest[1:]]
    else:
        return None
    at = [*borders(content), len(content)]
    tokens = len(at) - 1

    def cut(number: int) -> Text:
        left = tokens - 1 - number
        front = 0 if keep == "left" else (left + 1) // 2
        behind = content[at[tokens - left + front] :]
        # A transcript's turn starts with a space, messages and texts without: so does what is left of them.
        start = content[: at[front]] if front else content[: len(content) - len(content.lstrip())]
        return whole(start + (behind if front else behind.lstrip()))

    return _first(max(tokens - 1, 0), cut, fits)
