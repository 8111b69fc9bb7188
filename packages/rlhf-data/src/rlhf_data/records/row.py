"""Rows of a data file: columns and their other names, and every check of a value."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rlhf_data.errors import UserError
from rlhf_data.records.forms import forms_of
from rlhf_data.records.kind import ASSISTANT_TURN, Message, Text, common_prefix, is_empty

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns of every kind, which the chat template reads."""
_OTHER_NAMES = {"completion": ("response", "answer"), "messages": ("conversations",)}
_SYNONYMS = {
    "prompt": ("question", "query", "instruction", "input", "context", "problem", "user", "history"),
    "completion": ("output", "target", "reply", "text", "assistant", "generation", "solution"),
    "chosen": ("better", "preferred", "accepted", "winner", "positive", "response_chosen", "chosen_response"),
    "rejected": ("worse", "dispreferred", "loser", "negative", "response_rejected", "rejected_response"),
    "label": ("kto_tag", "labels", "preference", "is_good", "desirable", "rating", "score"),
    "completions": ("steps", "solution", "reasoning"),
    "labels": ("ratings", "step_labels", "scores"),
}
"""Names of a column in other data sets."""
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}
"""Roles by the name that ShareGPT's `from` gives them."""
_EMPTY = "empty completion after the prompt; expected what the model is to say"
_LABELS = {
    **dict.fromkeys(("desirable", "true", "1"), True),
    **dict.fromkeys(("undesirable", "false", "0"), False),
}


@dataclass(frozen=True)
class Row:
    """A row, the names of its columns, and its place."""

    values: dict[str, Any]
    columns: Mapping[str, str]
    where: str

    def name(self, column: str) -> str | None:
        """The row's name for a column; None if it has no value for it."""
        names = (self.columns[column],) if column in self.columns else (column, *_OTHER_NAMES.get(column, ()))
        return next((name for name in names if self.values.get(name) is not None), None)

    def has(self, *columns: str) -> bool:
        """Whether the row has a value in all of these columns."""
        return all(self.name(column) is not None for column in columns)

    def _gives(self, column: str) -> bool:
        """Whether the row has an optional column, or must have it: the user named it."""
        return column in self.columns or self.has(column)

    def missing(self, column: str) -> UserError:
        """The error for a column without a value."""
        name, present = self.columns.get(column, column), ", ".join(map(str, self.values)) or "no fields"
        near = nearest_column(column, [key for key in map(str, self.values) if key != column])
        return UserError(
            f"{self.where}, field {name}: missing; the row has {present}: add it or map another column to it"
            + (f", perhaps columns.{column}={near}" if near else ""),
            code="missing_column",
            where=self.where,
            column=name,
            nearest=near,
        )

    def get(self, column: str) -> tuple[Any, str]:
        """Value of a column, and the place that an error names."""
        name = self.name(column)
        if name is None:
            raise self.missing(column)
        return self.values[name], f"{self.where}, field {name}"

    def text(self, column: str) -> Text:
        """Text or messages of a column."""
        value, where = self.get(column)
        if isinstance(value, dict):
            return [_message(value, where)]
        if isinstance(value, str) and value.startswith("[{") and (items := _written_messages(value)):
            return _messages(items, where)
        return _messages(value, where) if isinstance(value, list) else _string(value, where)

    def said(self, column: str) -> Text:
        """Text or messages of a column, which must say something."""
        text = self.text(column)
        if is_empty(text):
            raise UserError(
                f"{self.get(column)[1]}: empty; expected a text that says something",
                code="empty_text",
                column=self.name(column),
            )
        return text

    def items(self, column: str) -> tuple[list[Any], str]:
        """List of a column, also where it is written as JSON in a text."""
        value, where = self.get(column)
        value = _from_json(value, where) if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not value:
            raise UserError(f"{where}: expected a list that is not empty, got {_short(value)}")
        return list(value), where

    def common(self) -> dict[str, Any]:
        """Fields common to all records: the place, and the arguments for the chat template."""
        template = {}
        if self.has("tools") and self.get("tools")[0] not in ("", []):
            template["tools"] = self.items("tools")[0]
        if self.has("chat_template_kwargs"):
            value, where = self.get("chat_template_kwargs")
            if not isinstance(value, dict):
                raise UserError(f"{where}: expected an object, got {_short(value)}")
            template |= {name: part for name, part in value.items() if part is not None}
        return {"template": template or None, "where": self.where}

    def messages(self) -> tuple[list[Message], str]:
        """The conversation in the column `messages`, and the place that an error names."""
        items, where = self.items("messages")
        return _messages(items, where), where

    def prompt_and_completion(self) -> tuple[Text, Text]:
        """Prompt and completion; without a prompt, or in a conversation, split before the last answer."""
        if not self.has("completion") and self.has("messages"):
            messages, where = self.messages()
            split = split_last_turn(messages)
            if split is None or is_empty(split[1]):
                raise UserError(f"{where}: expected at least one message that the assistant says")
            return split
        completion = self.said("completion")
        where = self.get("completion")[1]
        if self._gives("prompt"):
            prompt = self.text("prompt")
            _check_alike(prompt, completion, where)
            return prompt, completion
        split = split_last_turn(completion)
        if split is None:
            raise self.missing("prompt")
        if is_empty(split[1]):
            raise UserError(f"{where}: {_EMPTY}", code="empty_completion", where=where)
        return split

    def pair(self) -> tuple[Text, Text, Text]:
        """Prompt, chosen and rejected; without a prompt, what both completions start with is the prompt."""
        chosen, rejected = self.said("chosen"), self.said("rejected")
        places = [self.get(column)[1] for column in ("chosen", "rejected")]
        _check_alike(chosen, rejected, places[1])
        if chosen == rejected:
            raise UserError(
                f"{places[1]}: the same as chosen; expected another completion",
                code="same_as_chosen",
                where=places[1],
            )
        prompt, chosen, rejected = self.unchecked_pair()
        for completion, where in zip((chosen, rejected), places, strict=True):
            if is_empty(completion):
                raise UserError(f"{where}: {_EMPTY}", code="empty_completion", where=where)
        return prompt, chosen, rejected

    def unchecked_pair(self) -> tuple[Text, Text, Text]:
        """The same, also where a completion is empty or both are equal."""
        chosen, rejected = self.text("chosen"), self.text("rejected")
        places = [self.get(column)[1] for column in ("chosen", "rejected")]
        _check_alike(chosen, rejected, places[1])
        prompt = self.text("prompt") if self._gives("prompt") else None
        if prompt is None and self.has("messages"):
            prompt = self.messages()[0]
        if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
            # A text next to messages repeats their start.
            prompt, chosen, rejected = split_pair(chosen, rejected)
        _check_alike(prompt, chosen, places[0])
        return prompt, chosen, rejected

    def label(self, column: str) -> bool:
        """A label in one of its spellings: desirable or not."""
        value, where = self.get(column)
        if isinstance(value, bool | int | float | str):
            text = str(int(value) if value in (0, 1) else value).strip().lower()
            if text in _LABELS:
                return _LABELS[text]
        raise UserError(
            f'{where}: expected true or false, 1 or 0, "desirable" or "undesirable", got {value!r}'
        )

    def number(self, column: str) -> float:
        """A finite number, also one that is written as a text, as in CSV files; not true or false."""
        value, where = self.get(column)
        return _number(None if isinstance(value, bool) else value, where)

    def texts(self, column: str, *, item: str) -> tuple[str, ...]:
        """A list of non-empty texts; errors call each an `item`, such as "step"."""
        texts, where = self.items(column)
        for number, text in enumerate(texts, start=1):
            if not _string(text, f"{where}, {item} {number}").strip():
                raise UserError(f"{where}, {item} {number}: empty; expected a text that says something")
        return tuple(texts)

    def labels(self, column: str, count: int, *, item: str) -> tuple[float, ...]:
        """A list of labels from 0 to 1, one for each of `count` texts that errors call an `item`."""
        items, where = self.items(column)
        if len(items) != count:
            raise UserError(f"{where}: {len(items)} labels for {count} {item}s; expected one for each")
        labels = tuple(
            float(_LABELS[item.lower()])
            if isinstance(item, str) and item.lower() in _LABELS
            else _number(item, where)
            for item in items
        )
        if not all(0 <= label <= 1 for label in labels):
            raise UserError(f"{where}: expected labels from 0 (wrong) to 1 (right), got {items}")
        return labels


def nearest_column(column: str, present: Sequence[str]) -> str | None:
    """The column of a row that may be meant by a usual name: a synonym, or one that is spelt alike."""
    by_name = {name.lower(): name for name in present}
    known = next((by_name[name] for name in _SYNONYMS.get(column, ()) if name in by_name), None)
    alike = difflib.get_close_matches(column, by_name, n=1, cutoff=0.7)
    return known or (by_name[alike[0]] if alike else None)


def usual_columns(
    row: Mapping[str, Any], kind: str, columns: Mapping[str, Any], where: str
) -> tuple[Mapping[str, Any], bool]:
    """Name the columns of a row as a kind of records does, where a known form names them otherwise.

    `columns` maps usual names to those of the file; see `forms_of`.

    Returns:
        The row, and whether its texts are turns of a chat.
    """
    names = frozenset(name for name, value in row.items() if value is not None)
    for form in forms_of(names, kind, frozenset(columns)):
        values = form.convert(row, where)
        if values is not row:
            return values, form.is_chat
    return row, False


def joined_columns(
    row: Mapping[str, Any], columns: Mapping[str, Sequence[str]], where: str
) -> dict[str, Any]:
    """A row with the texts of several columns joined, a blank line between, under the usual name.

    Missing columns and empty texts are left out.
    """
    values = dict(row)
    for name, parts in columns.items():
        texts = [str(row[part]) for part in parts if row.get(part) not in (None, "")]
        if not texts:
            raise UserError(
                f"{where}, field {name}: the row has none of {', '.join(parts)}, which are to make it",
                code="missing_column",
                where=where,
                column=name,
            )
        values[name] = "\n\n".join(texts)
    return values


def split_pair(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Split two conversations with a common beginning into prompt, chosen and rejected completion.

    Transcripts are split at the start of the last assistant turn within their common beginning; other texts
    at the last white space of it; message lists after the last message that both share. The prompt is empty
    if nothing is shared.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        shared = chosen[: common_prefix(chosen, rejected)]
        turn = shared.rfind(ASSISTANT_TURN)
        at = turn + len(ASSISTANT_TURN) if turn >= 0 else _last_space(shared)
    else:
        at = common_prefix(chosen, rejected)
    return chosen[:at], chosen[at:], rejected[at:]


def split_last_turn(conversation: Text) -> tuple[Text, Text] | None:
    """Split a conversation before what the assistant says last; None if no turn is the assistant's."""
    if isinstance(conversation, str):
        turn = conversation.rfind(ASSISTANT_TURN)
        at = turn + len(ASSISTANT_TURN) if turn >= 0 else None
    else:
        roles = [message["role"] for message in conversation]
        at = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else None
    return None if at is None else (conversation[:at], conversation[at:])


def _last_space(text: str) -> int:
    """Index of the last run of white space, 0 if there is none."""
    match = re.search(r"\s+\S*$", text)
    return match.start() if match else 0


def _check_alike(first: Text, second: Text, where: str) -> None:
    if isinstance(first, str) != isinstance(second, str):
        kinds = ["a text" if isinstance(value, str) else "messages" for value in (first, second)]
        raise UserError(f"{where}: {kinds[1]} beside {kinds[0]}; write both as texts or both as messages")


def _messages(value: list[Any], where: str) -> list[Message]:
    if not value:
        raise UserError(f"{where}: expected at least one message, got an empty list")
    return [_message(item, f"{where}, message {number}") for number, item in enumerate(value, start=1)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object with role and content, got {_short(value)}")
    message = {name: part for name, part in value.items() if part is not None}
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise UserError(
                f"{where}, from: expected one of {', '.join(_ROLES)}, got {_short(speaker)}",
                code="unknown_role",
                where=where,
            )
        message["role"] = _ROLES[speaker]
    if "value" in message and "content" not in message:
        message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        raise UserError(f"{where}: expected a role such as user or assistant, got {_short(value)}")
    if "content" not in message and not message.get("tool_calls"):
        raise UserError(f"{where}: the content is missing; expected a text")
    _string(message.get("content", ""), where)
    return message


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: expected a text, got {_short(value)}")
    return check_text(value, where)


def check_text(value: str, where: str) -> str:
    """Refuse text that cannot be written as UTF-8: JSON can hold half of a surrogate pair.

    Raises:
        UserError: it cannot.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: character {error.start} is half of a surrogate pair, which is not text; correct it",
            code="invalid_text",
            where=where,
        ) from error
    return value


def _number(value: Any, where: str) -> float:
    try:
        number = float(value) if isinstance(value, bool | int | float | str | Decimal) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: expected a number, got {_short(value)}", code="not_a_number", where=where)
    return number


def _written_messages(text: str) -> list[Any] | None:
    """The messages that a text holds as JSON, as in tables of texts; None for an ordinary text."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    written = all(
        isinstance(item, dict) and ({"role", "content"} <= item.keys() or {"from", "value"} <= item.keys())
        for item in items
    )
    return items if written else None


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected a list, got the text {_short(text)}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
