"""The messages of a conversation, checked, as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_data import Message
from rlhf_serve.errors import invalid_request

_ROLES = ("assistant", "developer", "system", "tool", "user")


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with plain texts, and calls whose arguments are objects.

    Raises:
        APIError: 400, for a message without role or text; it is named.
    """
    found = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise invalid_request(
                f"messages[{i}].role must be one of {', '.join(_ROLES)}", f"messages[{i}].role"
            )
        own: dict[str, Any] = {"role": "system" if role == "developer" else role}
        content = message.get("content")
        if message.get("tool_calls"):
            if role != "assistant":
                raise invalid_request(
                    f"messages[{i}] has tool_calls; only the assistant calls tools", f"messages[{i}]"
                )
            own["tool_calls"] = checked_calls(message["tool_calls"], f"messages[{i}].tool_calls")
            content = content or ""
        if isinstance(content, list):
            content = joined_texts(content)
        if not isinstance(content, str):
            raise invalid_request(
                f"messages[{i}].content must be a text, or a list of parts of type text",
                f"messages[{i}].content",
            )
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        found.append({**rest, **own, "content": content})
    return found


def checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The `tool_calls` of a message as chat templates read them: with arguments as an object.

    Raises:
        APIError: 400; the call is named.
    """
    if not isinstance(calls, list):
        raise invalid_request(f"{where} must be a list of calls", where)
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise invalid_request(f"{where}[{i}] must have a function with a name", f"{where}[{i}]")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            field = f"{where}[{i}].function.arguments"
            raise invalid_request(f"{field} must be a JSON object, as text", field)
        found.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return found


def joined_texts(parts: Sequence[Any], kinds: Sequence[str] = ("text",)) -> str | None:
    """The texts of a message's parts, one after the other; None if a part is not a text of these kinds."""
    found = ""
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in kinds else None
        if not isinstance(text, str):
            return None
        found += text
    return found
