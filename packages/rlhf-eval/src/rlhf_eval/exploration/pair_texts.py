"""A preference pair as plain texts: the prompt, what the assistant says last, the form of the dialogue."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rlhf_data import Message, PreferenceRecord
from rlhf_eval.scoring import as_text

_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True, slots=True)
class PairTexts:
    """A pair as texts.

    Attributes:
        prompt: What both completions answer, messages below one another.
        chosen: What the assistant says last in the preferred dialogue.
        rejected: The same in the other dialogue.
        human_turns: Turns of the user in the preferred dialogue; any other prompt is one.
        ends_with_human: Whether a dialogue ends with a turn of the user.
        parts_early: Whether the dialogues part before the last turn of the assistant.
    """

    prompt: str
    chosen: str
    rejected: str
    human_turns: int
    ends_with_human: bool
    parts_early: bool


def pair_texts(record: PreferenceRecord) -> PairTexts:
    r"""The texts of a pair; a transcript (`\n\nHuman: ...`) is read as the dialogue it is."""
    if isinstance(record.chosen, list) and isinstance(record.rejected, list):
        return _of_messages(record.prompt, record.chosen, record.rejected)
    prompt, chosen, rejected = (as_text(text) for text in (record.prompt, record.chosen, record.rejected))
    if _ASSISTANT not in prompt:
        return PairTexts(prompt, chosen.strip(), rejected.strip(), 1, False, False)
    ends = [_HUMAN in text[text.rfind(_ASSISTANT) + 1 :] for text in (chosen, rejected)]
    return PairTexts(
        prompt,
        _last_turn(chosen),
        _last_turn(rejected),
        prompt.count(_HUMAN) + chosen.count(_HUMAN),
        any(ends),
        _ASSISTANT in chosen or _ASSISTANT in rejected or not prompt.rstrip().endswith(_ASSISTANT),
    )


def _last_turn(completion: str) -> str:
    start = completion.rfind(_ASSISTANT)
    said = completion[start + len(_ASSISTANT) :] if start >= 0 else completion
    return said.partition(_HUMAN)[0].strip()


def _of_messages(prompt: str | list[Message], chosen: list[Message], rejected: list[Message]) -> PairTexts:
    before: list[Message] = prompt if isinstance(prompt, list) else []
    return PairTexts(
        as_text(prompt),
        _last_reply(chosen),
        _last_reply(rejected),
        sum(message["role"] == "user" for message in (*before, *chosen)) or 1,
        any(messages and messages[-1]["role"] == "user" for messages in (chosen, rejected)),
        max(len(chosen), len(rejected)) > 1,
    )


def _last_reply(messages: list[Message]) -> str:
    replies = [message for message in messages if message["role"] == "assistant"] or messages
    if not replies:
        return ""
    calls = replies[-1].get("tool_calls")
    parts = [replies[-1].get("content") or "", json.dumps(calls, ensure_ascii=False) if calls else ""]
    return "\n".join(filter(None, map(str.strip, parts)))
