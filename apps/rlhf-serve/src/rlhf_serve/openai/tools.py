"""Tools that a model may call: rendered by its chat template, forced by a grammar, parsed from its text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_data import UserError
from rlhf_infer import Constraint, check_schema
from rlhf_serve.errors import invalid_request, shown
from rlhf_serve.openai.schema import ChatRequest
from rlhf_serve.service.chat_templates import template_text

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


@dataclass(frozen=True)
class CallFormat:
    """How a model writes a call: `begin`, then `{"name": ..., KEY: {...}}`, then `end`.

    Args:
        begin: the mark before a call; empty where the whole answer is calls.
        end: the mark after it.
        key: of the arguments.
    """

    begin: str
    end: str
    key: str


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Args:
        tools: as the chat template gets them.
        choice: `auto`, `required`, or the name of the one to be called.
        format: how the model writes calls.
        parallel: whether there may be several.
        constraint: what forces calls; None where the model decides.
    """

    tools: list[dict[str, Any]]
    choice: str
    format: CallFormat
    parallel: bool
    constraint: Constraint | None


def tool_use(body: ChatRequest, chat_template: Any) -> ToolUse | None:
    """The tools of a request; None where there are none, or none may be called.

    Raises:
        APIError: 400: a tool is malformed, or the model's chat template has no place for tools.
    """
    choice = _choice(body)
    if not body.tools or choice == "none":
        return None
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise invalid_request("two tools have the same name", "tools")
    if choice not in ("auto", "required", *names):
        raise invalid_request(f"tool_choice names {shown(choice)}, which tools does not list", "tool_choice")
    found, parallel = _format(chat_template), body.parallel_tool_calls is not False
    return ToolUse(tools, choice, found, parallel, _constraint(tools, choice, found, parallel))


def _choice(body: ChatRequest) -> str:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if not body.tools and choice not in ("none", "auto"):
        raise invalid_request("tool_choice needs tools", "tool_choice")
    if isinstance(choice, str):
        return choice
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise invalid_request(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    return name


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool as chat templates read it."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise invalid_request(f'{where} must be {{"type": "function", "function": {{...}}}}', where)
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 64 or not set(name) <= _NAME_CHARACTERS:
        raise invalid_request(
            f"{where}.function.name must be 1 to 64 letters, digits, dots, _ or -", f"{where}.function.name"
        )
    if not isinstance(function.get("description", ""), str | None):
        raise invalid_request(f"{where}.function.description must be a text", f"{where}.function.description")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise invalid_request(
            f"{where}.function.parameters must be a JSON schema", f"{where}.function.parameters"
        )
    if function.get("strict"):
        try:
            check_schema(parameters or {}, f"{where}.function.parameters")
        except UserError as error:
            raise invalid_request(str(error), f"{where}.function.parameters", "invalid_grammar") from error
    empty = {"type": "object", "properties": {}}
    return {"type": "function", "function": {**function, "parameters": parameters or empty}}


def _format(chat_template: Any) -> CallFormat:
    text = template_text(chat_template, tools=True)
    if "tools" not in text:
        raise invalid_request(
            "the model's chat template has no place for tools; leave tools out, or use another model",
            "tools",
            "tools_unsupported",
        )
    if "<function=" in text or "<|channel|>" in text or "tool_sep" in text:
        raise invalid_request(
            "the model's chat template has tools called in a form that this server does not read; expected "
            "JSON, bare or in <tool_call>",
            "tools",
            "tools_unsupported",
        )
    key = "parameters" if '"parameters": ' in text and '"arguments"' not in text else "arguments"
    marked = "<tool_call>" in text
    return CallFormat("<tool_call>\n", "\n</tool_call>", key) if marked else CallFormat("", "", key)


def _constraint(
    tools: Sequence[dict[str, Any]], choice: str, call_format: CallFormat, parallel: bool
) -> Constraint | None:
    """The grammar of the calls: where one is required, and of strict tools wherever one begins."""
    strict = any(tool["function"].get("strict") for tool in tools)
    if choice == "auto" and not strict:
        return None
    if choice == "auto" and not call_format.begin:
        raise invalid_request(
            "strict tools need tool_choice required or a function, as the model's chat template does not "
            "mark calls",
            "tools",
        )
    called = [t["function"] for t in tools if choice in ("auto", "required", t["function"]["name"])]
    tags = [_tag(function, call_format) for function in called]
    one = choice not in ("auto", "required") or not parallel or not call_format.begin
    if choice == "auto":
        found: dict[str, Any] = {"type": "triggered_tags"}
        found |= {"triggers": [call_format.begin.strip()], "tags": tags}
        found["stop_after_first"] = one
    else:
        found = {"type": "tags_with_separator", "tags": tags, "separator": "\n"}
        found |= {"at_least_one": True, "stop_after_first": one}
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": found}))


def _tag(function: Mapping[str, Any], call_format: CallFormat) -> dict[str, Any]:
    try:
        check_schema(function["parameters"])
        schema = function["parameters"]
    except UserError:  # strict tools have been checked; for others only an object is promised
        schema = {"type": "object"}
    return {
        "type": "tag",
        "begin": f'{call_format.begin}{{"name": {json.dumps(function["name"])}, "{call_format.key}": ',
        "content": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 8},
        "end": f"}}{call_format.end}",
    }
