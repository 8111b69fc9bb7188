"""The server through the clients that others wrote: openai's and cohere's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel

MODEL = "policy"
CONTEXT = 768
USER: Any = {"role": "user", "content": "where is mary ?"}
ASK: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 150, "seed": 7}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "where is", "max_tokens": 8, "seed": 7}
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }} in <tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "maximum": 9, "minimum": 1},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "time"}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def server(
    start: Callable[..., Any], folders: Path, byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    from rlhf_models import build_tiny_llama

    folder = tmp_path_factory.mktemp("tools")
    (folder / "template").write_text(TEMPLATE)
    ends = {"eos_token_id": byte_tokenizer.eos_token_id, "pad_token_id": byte_tokenizer.pad_token_id}
    policy = build_tiny_llama(
        len(byte_tokenizer), seed=1, max_positions=CONTEXT, initializer_range=0.3, **ends
    )
    policy.save_pretrained(folder / "policy")
    byte_tokenizer.save_pretrained(folder / "policy")
    return start(
        *("--model", str(folder / "policy"), "--chat-template", str(folder / "template")),
        *("--reward-model", str(folders / "reward"), "--set", "n=1"),
        *("--cors-origin", "https://example.org"),
    )


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def refused(call: Callable[..., Any], **fields: Any) -> Any:
    with pytest.raises(openai.BadRequestError) as caught:
        call(**fields)
    return caught.value.body


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        pytest.param({"type": "json_object"}, marks=pytest.mark.slow),
    ],
)
def test_answers_in_json(client: Any, form: Any) -> None:
    for fields in ({"temperature": 0}, {"top_p": 0.8, "n": 2, "logprobs": True, "frequency_penalty": 1.0}):
        # An object of any kind may be longer than the answer: then it is cut.
        answer = client.chat.completions.create(**ASK, response_format=form, **fields)
        for choice in answer.choices:
            if choice.finish_reason == "stop":
                found = json.loads(choice.message.content)
                assert jsonschema_rs.is_valid(SCHEMA, found) or form["type"] == "json_object"
            else:
                assert form["type"] == "json_object" and choice.message.content.startswith("{")


def test_parsed_answers(client: Any) -> None:
    class Trip(BaseModel):
        place: str
        days: int

    fields = ASK | {"max_tokens": 150}
    answer = client.chat.completions.parse(**fields, response_format=Trip, temperature=0.5)
    choice = answer.choices[0]
    assert choice.finish_reason == "length" or isinstance(choice.message.parsed, Trip)
    format_ = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}}
    response = client.responses.create(model=MODEL, input="where ?", text=format_)
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(response.output_text))


def test_a_streamed_form_is_the_whole_one(client: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = ASK | {"response_format": form, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [
        chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices
    ]
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
    streamed = [entry.token for c in chunks if c.logprobs for entry in c.logprobs.content]
    assert streamed == [entry.token for entry in whole.logprobs.content]
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(whole.message.content))


@pytest.mark.parametrize(
    "extra, pattern",
    [
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, "x|y"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"guided_json": '{"type": "null"}'}, "null"),
        ({"guided_grammar": 'root ::= "q"'}, "q"),
    ],
)
def test_vllms_forms(client: Any, extra: Any, pattern: str) -> None:
    chat = client.chat.completions.create(**ASK, extra_body=extra)
    assert re.fullmatch(pattern, chat.choices[0].message.content)
    text = client.completions.create(**TEXT, extra_body=extra)
    assert re.fullmatch(pattern, text.choices[0].text) and text.choices[0].finish_reason == "stop"


def test_forms_that_cannot_be(client: Any) -> None:
    create = client.chat.completions.create
    unsupported: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    assert refused(create, **ASK, response_format=unsupported)["code"] == "invalid_grammar"
    assert "type" in refused(create, **ASK, response_format={"type": "xml"})["param"]
    for extra in (
        {"guided_regex": "(("},
        {"guided_choice": []},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": {}, "regex": "a"}},
        {"structured_outputs": {"wish": 1}},
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"guided_regex": "a", "min_tokens": 3},
        {"guided_regex": "a", "ignore_eos": True},
        {"guided_regex": "a" * 100_000},
        {"guided_json": "{"},
    ):
        assert refused(create, **ASK, extra_body=extra)["message"]


def test_forced_calls(client: Any) -> None:
    for choice in ("required", NAMED):
        answer = client.chat.completions.create(
            **ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, temperature=0.7
        )
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "weather" and call.id.startswith("call_")
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(call.function.arguments))
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None


def test_streamed_calls_are_the_whole_ones(client: Any) -> None:
    asked = ASK | {"tools": [TOOL, OTHER], "tool_choice": NAMED}
    [whole] = client.chat.completions.create(**asked).choices[0].message.tool_calls
    deltas: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            deltas += choice.delta.tool_calls or []
    assert deltas[0].function.name == "weather" and deltas[0].id and len(deltas) > 2
    assert {delta.index for delta in deltas} == {0} and not any(delta.id for delta in deltas[1:])
    assert "".join(delta.function.arguments or "" for delta in deltas) == whole.function.arguments


def test_a_conversation_with_calls_goes_on(client: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"days": 1}'}}
    messages: Any = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "rain"})
    answer = client.chat.completions.create(**ASK | {"messages": messages}, tools=[TOOL])
    assert answer.choices[0].finish_reason in ("stop", "length")
    plain = client.chat.completions.create(**ASK | {"messages": messages}, tools=[TOOL], tool_choice="none")
    assert plain.usage.prompt_tokens < answer.usage.prompt_tokens  # the tools are not shown
    call["function"]["arguments"] = "[]"
    assert "arguments" in refused(client.chat.completions.create, **ASK | {"messages": messages})["param"]


def test_tools_that_cannot_be(client: Any) -> None:
    create = client.chat.completions.create
    wrong: list[dict[str, Any]] = [
        {"tools": [TOOL, TOOL]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        {"tool_choice": "required"},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
            ]
        },
    ]
    for fields in wrong:
        assert refused(create, **ASK, **fields)["message"]
    form = {"structured_outputs": {"regex": "a+"}}
    assert refused(create, **ASK, tools=[TOOL], extra_body=form)["param"] == "structured_outputs"


def test_penalties_biases_and_ends(client: Any) -> None:
    create = client.completions.create
    plain = create(**TEXT, logprobs=0).choices[0]
    assert plain.text != create(**TEXT | {"presence_penalty": 2.0, "logit_bias": {"70": 50}}).choices[0].text
    only = create(**TEXT, logit_bias={"70": 100}, extra_body={"ignore_eos": True})
    assert len(set(only.choices[0].text)) == 1 and only.usage.completion_tokens == 8
    ended = create(**TEXT, logit_bias={"70": 100}, extra_body={"stop_token_ids": [70]})
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    streamed = create(**TEXT, logit_bias={"70": 100}, extra_body={"stop_token_ids": [70]}, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == ""
    for fields in ({"logit_bias": {"x": 1}}, {"logit_bias": {"999999": 1}}, {"presence_penalty": 3}):
        assert refused(create, **TEXT, **fields)["param"].startswith(next(iter(fields)))
    unknown: list[dict[str, Any]] = [{"logit_bias": {"999999": 1}}, {"prompt": [10**9]}]
    for fields in (*unknown, {"extra_body": {"stop_token_ids": [10**9]}}):
        error = refused(create, **TEXT | fields)
        assert (error["code"], error["param"]) == (
            "unknown_token",
            next(iter(fields.get("extra_body", fields))),
        )


def test_echo_and_log_probs_of_the_prompt(client: Any) -> None:
    create = client.completions.create
    scored = create(**TEXT | {"max_tokens": 0}, echo=True, logprobs=2).choices[0]
    assert scored.text == "where is" and scored.finish_reason == "length"
    logprobs = scored.logprobs
    assert "".join(logprobs.tokens) == "where is" and logprobs.token_logprobs[0] is None
    assert all(len(top) == 2 for top in logprobs.top_logprobs[1:]) and logprobs.top_logprobs[0] is None
    both = create(**TEXT, echo=True, logprobs=2).choices[0]
    alone = create(**TEXT, logprobs=2).choices[0]
    assert both.text == "where is" + alone.text
    assert both.logprobs.token_logprobs[: len(logprobs.tokens)] == pytest.approx(logprobs.token_logprobs)
    assert both.logprobs.text_offset[len(logprobs.tokens)] == len("where is")
    several = create(**TEXT | {"prompt": ["where is", "a b"], "max_tokens": 0}, echo=True, logprobs=0)
    assert [choice.text for choice in several.choices] == ["where is", "a b"]
    asked = {"prompt_logprobs": 1}
    [first, *rest] = create(**TEXT, extra_body=asked).choices[0].prompt_logprobs
    assert first is None and all(1 <= len(entries) <= 2 for entries in rest)
    assert any(entry["rank"] == 1 for entry in rest[0].values())
    chat = client.chat.completions.create(**ASK, extra_body=asked | {"max_tokens": 1})
    assert chat.prompt_logprobs[0] is None and len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_nothing_is_drawn_in_vain(client: Any) -> None:
    create = client.completions.create
    nothing = TEXT | {"max_tokens": 0}
    assert refused(create, **nothing)["param"] == "max_tokens"
    assert refused(create, **nothing, echo=True)["param"] == "max_tokens"
    assert refused(create, **nothing, echo=True, logprobs=1, n=2)["param"] == "n"
    assert refused(create, **TEXT, echo=True, stream=True)["param"] == "echo"


@pytest.mark.slow
def test_lengths(client: Any, server: Any) -> None:
    free = {key: value for key, value in ASK.items() if key != "max_tokens"}
    usage = client.chat.completions.create(**free, extra_body={"ignore_eos": True}).usage
    assert usage.total_tokens == CONTEXT  # the rest of the context
    long: Any = ["a"] * 5000
    asked = TEXT | {"prompt": "".join(long)}
    assert refused(client.completions.create, **asked)["param"] == "prompt"
    for kept, tokens in ((-1, CONTEXT - 8), (5, 5)):
        answer = client.completions.create(**asked, extra_body={"truncate_prompt_tokens": kept})
        assert answer.usage.prompt_tokens == tokens
    too_many = {"truncate_prompt_tokens": 10**12}
    assert (
        refused(client.completions.create, **asked, extra_body=too_many)["param"] == "truncate_prompt_tokens"
    )


def test_a_last_message_is_continued(client: Any, server: Any) -> None:
    messages: Any = [USER, {"role": "assistant", "content": "She is"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    _, tokens, _ = server.fetch("/tokenize", body)
    _, text, _ = server.fetch("/detokenize", {"tokens": tokens["tokens"]})
    assert text["prompt"].endswith("assistant: She is")
    extra = {key: value for key, value in body.items() if key != "messages"}
    answer = client.chat.completions.create(**ASK | {"messages": messages}, extra_body=extra)
    assert answer.usage.prompt_tokens == tokens["count"]
    create = client.chat.completions.create
    assert refused(create, **ASK, extra_body={"continue_final_message": True})["param"] == "messages"


def test_tokens_and_back(server: Any) -> None:
    body = {"prompt": "where is ö ?", "return_token_strs": True}
    status, found, _ = server.fetch("/tokenize", body)
    assert status == 200 and found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.fetch("/detokenize", {"tokens": found["tokens"]})[1]["prompt"] == "where is ö ?"
    for path, wrong in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [USER]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert server.fetch(path, wrong)[0] == 400


# Of cohere itself, on Python 3.14.
@pytest.mark.filterwarnings("ignore:'asyncio.iscoroutinefunction' is deprecated:DeprecationWarning")
def test_reranking(server: Any) -> None:
    cohere = pytest.importorskip("cohere")
    documents = ["in the garden", "nowhere", "in the kitchen with a ball"]
    _, scores, _ = server.fetch("/score", {"text_1": "where is mary ?", "text_2": documents})
    expected = sorted(((each["score"], each["index"]) for each in scores["data"]), reverse=True)
    for made in (cohere.ClientV2, cohere.Client):
        with httpx.Client() as http:
            client = made(api_key="none", base_url=server.url, httpx_client=http)
            found = client.rerank(model=MODEL, query="where is mary ?", documents=documents, top_n=2)
        got = [(each.relevance_score, each.index) for each in found.results]
        assert got == [pytest.approx(pair) for pair in expected[:2]]
    jina = {"query": "where is mary ?", "documents": [{"text": text} for text in documents]}
    _, body, _ = server.fetch("/v1/rerank", jina | {"return_documents": True})
    assert [each["document"]["text"] for each in body["results"]] == [documents[i] for _, i in expected]
    assert body["usage"]["total_tokens"] == scores["usage"]["total_tokens"] > 0
    _, chat, _ = server.fetch("/rerank", {"query": [USER], "documents": documents})
    _, ours, _ = server.fetch("/v1/score", {"text_1": [USER], "text_2": documents})
    assert {each["index"]: each["relevance_score"] for each in chat["results"]} == {
        each["index"]: pytest.approx(each["score"]) for each in ours["data"]
    }
    for wrong in ({"documents": []}, {"documents": [{"x": 1}]}, {"documents": ["a"], "top_n": 0}):
        assert server.fetch("/rerank", {"query": "a", **wrong})[0] == 400


def test_responses(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 20, "extra_body": {"seed": 3}}
    response = client.responses.create(**asked, input="where is mary ?", instructions="be brief")
    assert response.status in ("completed", "incomplete") and response.usage.output_tokens <= 20
    events = list(
        client.responses.create(**asked, input="where is mary ?", instructions="be brief", stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == response.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == response.output_text
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "where ?"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]
    assert client.responses.create(**asked, input=history).output
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**asked, input="a", previous_response_id="x")


def test_responses_call_functions(client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    asked: dict[str, Any] = {"model": MODEL, "input": "where ?", "tools": [tool], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    [call] = client.responses.create(**asked).output
    assert call.type == "function_call" and jsonschema_rs.is_valid(SCHEMA, json.loads(call.arguments))
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_response().output
    assert "response.function_call_arguments.done" in kinds
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(streamed.arguments))


def test_web_pages_of_an_origin(server: Any) -> None:
    asks = {"origin": "https://example.org", "access-control-request-method": "POST"}
    status, _, headers = server.fetch("/v1/chat/completions", headers=asks, method="OPTIONS")
    assert status == 200 and headers["access-control-allow-origin"] == "https://example.org"
    stranger = asks | {"origin": "https://other.example"}
    assert server.fetch("/v1/chat/completions", headers=stranger, method="OPTIONS")[0] == 400
    _, _, headers = server.fetch("/health", headers={"origin": "https://example.org"})
    assert headers["access-control-allow-origin"] == "https://example.org"
