"""Calls of tools in a growing text: what is content, and what is a call's name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlhf_serve.openai.tools import CallFormat

_HEAD = re.compile(r'[\s\[]*\{\s*"name"\s*:\s*("[^"\\\x00-\x1f]*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_BLANK = " \t\r\n"


@dataclass(frozen=True)
class Part:
    """The next part of an answer.

    Args:
        content: text outside of calls.
        call: number of the call that this is of; None for content.
        name: of the tool, in a call's first part.
        arguments: the next characters of its arguments, JSON.
    """

    content: str = ""
    call: int | None = None
    name: str = ""
    arguments: str = ""


@dataclass
class _Value:
    """Finds where a JSON value ends, character by character."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False
    begun: bool = False

    def ends_at(self, text: str, start: int) -> int | None:
        """The place behind the value's last character; None if it is not there yet."""
        for place in range(start, len(text)):
            character = text[place]
            if self.quoted:
                self.quoted = self.escaped or character != '"'
                self.escaped = character == "\\" and not self.escaped
            elif character == '"':
                self.quoted = True
            elif character in "{[":
                self.depth += 1
            elif character in "}],":
                if self.depth == 0:
                    return place  # a number or a word ends before it
                self.depth -= character != ","
            else:
                continue
            self.begun = True
            if not self.depth and not self.quoted:
                return place + 1
        return None


@dataclass
class ToolCallParser:
    """Splits a streamed answer into content and tool calls.

    Text that looks like a call but cannot be parsed as one stays content.
    """

    format: CallFormat
    calls: int = 0
    """Calls so far."""
    _buffer: str = ""
    _state: str = "text"
    _value: _Value = field(default_factory=_Value)
    _spoken: bool = False
    _blanks: str = ""

    def add(self, text: str) -> list[Part]:
        """The parts that are certain now and were not before."""
        self._buffer += text
        return list(self._parts(last=False))

    def rest(self) -> list[Part]:
        """The remaining parts when the answer has ended."""
        return list(self._parts(last=True))

    def _parts(self, last: bool) -> Iterator[Part]:
        while True:
            before = self._state, len(self._buffer)
            yield from getattr(self, f"_in_{self._state}")(last)
            if (self._state, len(self._buffer)) == before:
                return

    def _in_text(self, last: bool) -> Iterator[Part]:
        mark, buffer = self.format.begin.strip(), self._buffer
        if not mark:
            start = buffer.lstrip(_BLANK)[:1]
            if not self._spoken and start in ("{", "["):
                self._state = "head"
            elif start or last:
                yield from self._say(buffer)
            return
        end = buffer.find(mark)
        if end >= 0:
            text = buffer[:end].rstrip(_BLANK)
            self._blanks, self._state = buffer[len(text) : end], "head"
            yield from self._say(text, end + len(mark))
        else:
            yield from self._say(buffer[: len(buffer) - (0 if last else _held_back(buffer, mark))])

    def _say(self, text: str, read: int | None = None) -> Iterator[Part]:
        """Content from the buffer, whose first `read` characters are consumed; None for those of the text."""
        self._buffer = self._buffer[len(text) if read is None else read :]
        if text:
            self._spoken = True
            yield Part(text)

    def _in_head(self, last: bool) -> Iterator[Part]:
        buffer, mark = self._buffer, self.format.end.strip()
        if found := _HEAD.match(buffer):
            if found.end() == len(buffer) and not last:
                return  # blanks may follow
            yield from self._call(json.loads(found[1]))
            self._buffer, self._state, self._value = buffer[found.end() :], "arguments", _Value()
            return
        end = buffer.find(mark) if mark else _json_end(buffer)
        if end < 0 and not last:
            return
        body, self._state = buffer[: end if end >= 0 else len(buffer)], "text"
        if call := _call_of(body):
            self._buffer, self._state = buffer[len(body) :], "tail"
            yield from self._call(*call)
        else:
            read = len(body) + (len(mark) if end >= 0 else 0)
            self._buffer = f"{self._blanks}{self.format.begin.strip()}{buffer}"
            yield from self._say(self._buffer[: len(self._buffer) - len(buffer) + read])

    def _call(self, name: str, arguments: str = "") -> Iterator[Part]:
        yield Part(call=self.calls, name=name, arguments=arguments)
        self.calls += 1

    def _in_arguments(self, last: bool) -> Iterator[Part]:
        end = self._value.ends_at(self._buffer, 0)
        piece = self._buffer if end is None else self._buffer[:end]
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._state = "tail"
        if piece:
            yield Part(call=self.calls - 1, arguments=piece)

    def _in_tail(self, last: bool) -> Iterator[Part]:
        mark = self.format.end.strip()
        end = self._buffer.find(mark) if mark else 0
        if end < 0:
            if last:
                self._buffer = ""
            return
        self._buffer = self._buffer[end + len(mark) :]
        self._state = "between"
        yield from ()

    def _in_between(self, last: bool) -> Iterator[Part]:
        """After a call: blanks, what closes it, and what separates it from the next."""
        self._buffer = self._buffer.lstrip(_BLANK if self.format.begin else "}];," + _BLANK)
        if self._buffer:
            self._state = "head" if not self.format.begin and self._buffer[0] == "{" else "text"
            self._spoken = True
        yield from ()


def _held_back(text: str, mark: str) -> int:
    """Characters at a text's end that may be the beginning of a mark, with the blanks before them."""
    most = min(len(mark) - 1, len(text))
    length = next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
    kept = text[: len(text) - length]
    return length + len(kept) - len(kept.rstrip(_BLANK))


def _json_end(text: str) -> int:
    """Where the JSON value at the beginning of a text ends; -1 where there is none."""
    start = len(text) - len(text.lstrip(_BLANK))
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return -1


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call in an unusual order; None where it is none."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
