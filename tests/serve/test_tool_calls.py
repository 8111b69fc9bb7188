"""Calls of tools, found in texts that come in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_serve.errors import APIError
from rlhf_serve.openai.schema import ChatRequest
from rlhf_serve.openai.tool_calls import Part, ToolCallParser
from rlhf_serve.openai.tools import CallFormat, tool_use

MARKED = CallFormat("<tool_call>\n", "\n</tool_call>", "arguments")
BARE = CallFormat("", "", "parameters")
ONE = '{"name": "f", "arguments": {"a": "}, \\"{", "b": [1, {}]}}'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parsed(form: CallFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the calls with their arguments."""
    parser = ToolCallParser(form)
    parts: list[Part] = [part for piece in pieces for part in parser.add(piece)]
    parts += parser.rest()
    content, calls = "", []
    for part in parts:
        content += part.content
        if part.name:
            calls.append([part.name, ""])
        if part.call is not None:
            assert part.call == len(calls) - 1
            calls[-1][1] += part.arguments
    return content, [(name, arguments) for name, arguments in calls]


ARGUMENTS = '{"a": "}, \\"{", "b": [1, {}]}'
CASES = [
    (MARKED, f"<tool_call>\n{ONE}\n</tool_call>", "", [("f", ARGUMENTS)]),
    (MARKED, f"I.<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}\n</tool_call>", "I.", 2 * [("f", ARGUMENTS)]),
    (MARKED, f"<tool_call>{ONE}</tool_call> So.", "So.", [("f", ARGUMENTS)]),
    (MARKED, '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "", [("g", '{"x": 1}')]),
    (MARKED, "a <tool b < c\n", "a <tool b < c\n", []),
    (MARKED, "<tool_call>what?</tool_call> no", "<tool_call>what?</tool_call> no", []),
    (MARKED, "so <tool_call>{\"na", "so <tool_call>{\"na", []),
    (MARKED, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (MARKED, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    (BARE, ONE.replace("arguments", "parameters"), "", [("f", ARGUMENTS)]),
    (BARE, f" [{ONE}, {ONE}]", "", [("f", ARGUMENTS)] * 2),
    (BARE, f"{ONE}; {ONE}", "", [("f", ARGUMENTS)] * 2),
    (BARE, '{"place": "Rome"}', '{"place": "Rome"}', []),
    (BARE, "plain {}", "plain {}", []),
    (BARE, "[1, 2] and so on", "[1, 2] and so on", []),
    (BARE, "", "", []),
]  # fmt: skip


@pytest.mark.parametrize("form, text, content, calls", CASES, ids=range(len(CASES)))
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_calls_are_found_in_any_pieces(
    form: CallFormat, text: str, content: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(form, pieces) == (content, calls)


@given(
    st.lists(
        st.sampled_from([*'{}[]",: \\na', "<tool_call>", "</tool_call>", ONE, '{"name": "f"']), max_size=12
    )
)
@settings(max_examples=200, deadline=None)
def test_no_text_breaks_it_and_pieces_change_nothing(pieces: list[str]) -> None:
    for form in (MARKED, BARE):
        assert parsed(form, pieces) == parsed(form, ["".join(pieces)]) == parsed(form, [*"".join(pieces)])


def request(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{}], "tools": [TOOL], **fields})


@pytest.mark.parametrize(
    "template, form",
    [
        ("{{ tools }} <tool_call> \"arguments\"", MARKED),
        ('{{ tools }} {"name": x, "parameters": y}', BARE),
        ({"default": "no", "tool_use": "{{ tools }} arguments"}, CallFormat("", "", "arguments")),
    ],
)  # fmt: skip
def test_templates_say_how_tools_are_called(template: object, form: CallFormat) -> None:
    found = tool_use(request(), template)
    assert found is not None and found.format == form and found.constraint is None


@pytest.mark.parametrize("template", [None, "{{ messages }}", "{{ tools }} <function=x>"])
def test_templates_without_tools_refuse_them(template: object) -> None:
    with pytest.raises(APIError) as caught:
        tool_use(request(), template)
    assert caught.value.code == "tools_unsupported"
    assert tool_use(request(tool_choice="none"), template) is None


@pytest.mark.parametrize("parameters", [{"type": "object", "properties": 5}, {"allOf": 5}])
def test_malformed_parameters_of_strict_tools_are_refused_and_others_are_any_object(parameters: Any) -> None:
    tool = {"name": "f", "parameters": parameters}
    with pytest.raises(APIError) as caught:
        tool_use(request(tools=[{"type": "function", "function": tool | {"strict": True}}]), "{{ tools }}")
    assert caught.value.status_code == 400 and caught.value.code == "invalid_grammar"
    loose = request(tools=[{"type": "function", "function": tool}], tool_choice="required")
    found = tool_use(loose, "{{ tools }} <tool_call>")
    assert found is not None and found.constraint is not None


def test_strict_tools_are_forced_once_a_call_begins() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    found = tool_use(request(tools=[strict]), "{{ tools }} <tool_call>")
    assert found is not None and found.constraint is not None
    assert json.loads(found.constraint.value)["format"]["type"] == "triggered_tags"
    with pytest.raises(APIError):
        tool_use(request(tools=[strict]), "{{ tools }}")
