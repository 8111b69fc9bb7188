"""The body of `POST /v1/responses`, and the chat request that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from rlhf_serve.errors import invalid_request
from rlhf_serve.openai.schema import ChatRequest, Generation, Messages, Tools, Utf8
from rlhf_serve.service.messages import joined_texts

_OWN = ("input", "instructions", "max_output_tokens", "text", "truncation")
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(Generation):
    """`POST /v1/responses`, as far as texts and functions go; nothing is stored."""

    input: Utf8 | Messages
    """A text, or messages, calls of functions and their results."""
    instructions: Utf8 | None = None
    """The system's message before them."""
    max_output_tokens: Annotated[StrictInt, Field(ge=1, le=1 << 62)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    text: dict[str, Any] | None = None
    """`{"format": ...}`: the form of the answer, as `response_format`."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` drops the beginning of an input that is too long."""
    chat_template_kwargs: dict[str, Any] | None = None

    def to_chat(self) -> ChatRequest:
        """The chat request that this one stands for.

        Raises:
            APIError: 400; the field is named.
        """
        if self.n not in (None, 1):
            raise invalid_request("a response has one answer; leave n out", "n")
        if self.prompt_logprobs is not None:
            raise invalid_request("a response has no log-probs; leave prompt_logprobs out", "prompt_logprobs")
        if self.max_tokens is not None:
            raise invalid_request("give max_output_tokens instead of max_tokens", "max_tokens")
        values = {name: getattr(self, name) for name in self.model_fields_set if name not in _OWN}
        values["messages"] = _messages(self.input, self.instructions)
        values["max_tokens"] = self.max_output_tokens
        if self.tools:
            values["tools"] = [_nested(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        if (form := _form(self.text)) is not None:
            values["response_format"] = form
        if self.truncation == "auto" and self.truncate_prompt_tokens is None:
            values["truncate_prompt_tokens"] = -1
        return ChatRequest.model_validate(values)


def _form(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    for name, value in (text or {}).items():
        if name != "format" and not (name == "verbosity" and value in (None, "medium")):
            raise invalid_request(f"text.{name[:64]} is not supported; leave it out", f"text.{name[:64]}")
    form = (text or {}).get("format")
    if not isinstance(form, dict | None):
        raise invalid_request("text.format must be an object with a type", "text.format")
    return form


def _nested(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A function as chats list it."""
    if tool.get("type") != "function":
        raise invalid_request(f"{where}.type must be function; other tools are not supported", where)
    if "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _messages(items: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            found.append({"role": item.get("role"), "content": _content(item, f"input[{i}].content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content({"content": item.get("output")}, f"input[{i}].output")
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise invalid_request(
                f"input[{i}].type must be message, function_call or function_call_output", f"input[{i}].type"
            )
    return found


def _content(item: Mapping[str, Any], where: str) -> str:
    content = item.get("content")
    if isinstance(content, list):
        content = joined_texts(content, _TEXT_PARTS)
    if not isinstance(content, str):
        raise invalid_request(f"{where} must be a text, or parts of type input_text", where)
    return content
