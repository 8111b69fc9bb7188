"""Completions in a given form, and what else decides which tokens may be drawn."""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
from typing import Any

import jsonschema_rs
import pytest
import torch
import xgrammar

from raises import raises_error
from rlhf_data import UserError
from rlhf_infer import Constraint, ContinuousBatcher, SamplingParams, TransformersEngine
from rlhf_infer.engines.constraints import ConstraintKind, check_schema
from rlhf_infer.vllm.settings import request_fields
from rlhf_models import build_tiny_llama

HI = {"type": "const_string", "value": "hi"}
NUMBER = {"type": "integer", "minimum": 3, "maximum": 20}
SCHEMAS: list[Any] = [
    NUMBER,
    {"enum": ["red", "a \"b\"", 7, None]},
    {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"a": NUMBER, "b": {"type": "boolean"}}, "required": ["a", "b"],
     "additionalProperties": False},
    {"type": "object", "properties": {"long": {"type": "string", "minLength": 12, "maxLength": 16}},
     "required": ["long"], "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "pattern": "^[^x]{6}$"}, "minItems": 2, "maxItems": 2},
    {"$ref": "#/$defs/leaf", "$defs": {"leaf": {"anyOf": [{"const": "x"}, {"type": "null"}]}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(byte_tokenizer: Any) -> TransformersEngine:
    ends = {"eos_token_id": byte_tokenizer.eos_token_id, "pad_token_id": byte_tokenizer.pad_token_id}
    model = build_tiny_llama(len(byte_tokenizer), seed=1, max_positions=512, initializer_range=0.3, **ends)
    return TransformersEngine(model, byte_tokenizer)


def texts(engine: TransformersEngine, params: SamplingParams, n: int = 6) -> list[str]:
    [rollouts] = engine.generate([[5, 6, 7]], n, params)
    assert all(rollout.finish_reason == "stop" for rollout in rollouts)
    return [engine.tokenizer.decode(r.completion_ids, skip_special_tokens=True) for r in rollouts]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: next(iter(schema)))
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_completions_follow_a_schema(engine: TransformersEngine, schema: Any, temperature: float) -> None:
    constraint = Constraint("json_schema", json.dumps(schema))
    params = SamplingParams(200, temperature, top_p=0.9, frequency_penalty=0.5, constraint=constraint)
    for text in texts(engine, params):
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text


def test_no_string_of_a_tool_holds_a_control_character(engine: TransformersEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 9}}, "required": ["a"]}
    tag = {"begin": "<call>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</call>"}
    tags = {"type": "tags_with_separator", "tags": [tag], "separator": "\n", "at_least_one": True}
    whole = {"type": "structural_tag", "format": tags}
    kinds: dict[ConstraintKind, Any] = {"json_schema": schema, "structural_tag": whole}
    for kind, value in kinds.items():
        constraint = Constraint(kind, json.dumps(value))
        short = xgrammar.GrammarMatcher(
            engine.compile(Constraint("json_schema", '{"type": "string", "maxLength": 1}'))
        )
        assert not short.accept_string('"\x06"')
        text = '{"a": "123456789%s"}' if kind == "json_schema" else '<call>{"a": "123456789%s"}</call>'
        for extra, allowed in (("é", True), ("\x06", False), ("\t", False), ("\x7f", True)):
            matcher = xgrammar.GrammarMatcher(engine.compile(constraint))
            assert matcher.accept_string(text % extra) is allowed, (kind, extra)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: next(iter(schema)))
def test_vllm_allows_what_our_engine_allows(engine: TransformersEngine, schema: Any) -> None:
    """As vLLM compiles what it gets: at every step of completions the same tokens are allowed."""
    constraint = Constraint("json_schema", json.dumps(schema))
    fields = request_fields(SamplingParams(8, constraint=constraint), engine.eos_token_ids)
    [(kind, text)] = fields["structured_outputs"].items()
    info = xgrammar.TokenizerInfo.from_huggingface(
        engine.tokenizer, vocab_size=engine.vocab_size, stop_token_ids=engine.eos_token_ids
    )
    theirs = getattr(xgrammar.GrammarCompiler(info), f"compile_{kind}")(text)
    pair = [xgrammar.GrammarMatcher(grammar) for grammar in (engine.compile(constraint), theirs)]
    bits = xgrammar.allocate_token_bitmask(2, engine.vocab_size)
    draw = random.Random(0)
    for _ in range(200):
        for row, matcher in enumerate(pair):
            matcher.fill_next_token_bitmask(bits, row)
        assert torch.equal(bits[0], bits[1])
        allowed = [i for i in range(engine.vocab_size) if bits[0, i // 32] >> i % 32 & 1]
        token = draw.choice([i for i in allowed if engine.tokenizer.decode([i]).isspace()] or allowed)
        assert [matcher.accept_token(token) for matcher in pair] == [True, True]
        if pair[0].is_terminated():
            break
    assert [matcher.is_terminated() for matcher in pair] == [True, True]


@pytest.mark.parametrize(
    "kind, value, pattern",
    [
        ("regex", "[ab]{3}-[0-9]+x", "[ab]{3}-[0-9]+x"),
        ("choice", '["yes", "no \\"x\\"", "maybé"]', 'yes|no "x"|maybé'),
        ("grammar", 'root ::= "(" root ")" | "x"', r"\(*x\)*"),
        ("structural_tag", json.dumps({"type": "structural_tag", "format": HI}), "hi"),
    ],
)  # fmt: skip
def test_other_forms(engine: TransformersEngine, kind: Any, value: str, pattern: str) -> None:
    params = SamplingParams(200, 1.2, constraint=Constraint(kind, value))
    assert all(re.fullmatch(pattern, text) for text in texts(engine, params))


def test_log_probs_are_the_models_own_under_a_constraint(engine: TransformersEngine) -> None:
    params = SamplingParams(30, 0.7, constraint=Constraint("regex", "[a-f]+"), raw_logprobs=True)
    [[rollout]] = engine.generate([[5, 6, 7]], 1, params)
    ids = torch.tensor([[5, 6, 7, *rollout.completion_ids]])
    with torch.no_grad():
        logits = engine.model(ids).logits[0, 2:-1]
    for logps, temperature in ((rollout.logps, 0.7), (rollout.raw_logps, 1.0)):
        expected = (logits / temperature).log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logps), expected, atol=2e-5, rtol=0)


def test_requests_of_different_forms_share_a_batch(engine: TransformersEngine) -> None:
    forms = [None, Constraint("regex", "[ab]{4,9}"), Constraint("choice", '["one", "two"]'), None]
    asked = [SamplingParams(40, 1.1, seed=i, constraint=form) for i, form in enumerate(forms)]
    alone = [engine.generate([[5, 6 + i]], 3, params)[0] for i, params in enumerate(asked)]
    batcher = ContinuousBatcher(engine)
    futures = [batcher.submit([5, 6 + i], 3, params) for i, params in enumerate(asked)]
    together = [future.result() for future in futures]
    batcher.close()
    ids = [[[r.completion_ids for r in rollouts] for rollouts in found] for found in (alone, together)]
    assert ids[0] == ids[1]


REFUSED: list[tuple[Any, str]] = [
    ({"not": NUMBER}, "keyword not"),
    ({"type": "string", "minLength": -1}, "minLength -1"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"allOf": [NUMBER, NUMBER]}, "allOf"),
    ({"$ref": "http://a/b"}, "another document"),
    ({"$ref": "#/$defs/a", "minimum": 3}, "minimum"),
    ({"required": ["a"]}, "required without type"),
    ({"type": "object", "required": ["a"]}, "requires 'a'"),
    ({"type": "string", "pattern": "a", "minLength": 3}, "minLength"),
    ({"type": "number", "multipleOf": 2}, "multipleOf"),
    ({"type": "array", "items": {"type": "object", "properties": {"x": {"not": {}}}}}, "items.properties.x"),
    ({"type": "foo"}, "foo"),
    ({"type": "string", "pattern": "(("}, "parenthesis"),
    ([], "must be an object"),
    ({"type": "object", "properties": {"not": NUMBER}}, ""),  # the name of a property is no keyword
]


@pytest.mark.parametrize("schema, says", REFUSED, ids=[says for _, says in REFUSED])
def test_what_is_not_enforced_is_refused(engine: TransformersEngine, schema: Any, says: str) -> None:
    constraint = Constraint("json_schema", json.dumps(schema))
    if not says:
        assert engine.compile(constraint)
        return
    with raises_error("invalid_grammar", kind="json_schema") as caught:
        engine.compile(constraint)
    assert says in str(caught.value)


LONG = "x" * 1001
TOO_LONG = {
    "enum": ("json_schema", json.dumps({"enum": [LONG, LONG + "b"]})),
    "const": ("json_schema", json.dumps({"type": "array", "items": {"const": LONG}})),
    "names": ("json_schema", json.dumps({"type": "object", "properties": {LONG: {"type": "null"}}})),
    "schema": ("json_schema", json.dumps({"enum": ["x" * 50 + str(i) for i in range(2000)]})),
    "regex": ("regex", "x" * 4097),
    "choice": ("choice", json.dumps([LONG, LONG + "b"])),
    "text": ("grammar", f'root ::= "{LONG}" | "{LONG}b"'),
    "grammar": ("grammar", "root ::= " + " | ".join(['"x"'] * 4000)),
}


@pytest.mark.parametrize("kind, value", TOO_LONG.values(), ids=TOO_LONG)
def test_a_constraint_that_would_compile_for_long_is_refused(
    engine: TransformersEngine, kind: Any, value: str
) -> None:
    with raises_error("invalid_grammar", kind=kind):
        engine.compile(Constraint(kind, value))


def test_texts_up_to_the_limit_are_compiled(engine: TransformersEngine) -> None:
    assert engine.compile(Constraint("choice", json.dumps(["x" * 1000, "y" * 1000])))
    described = {"type": "string", "description": "z" * 5000, "maxLength": 5}
    assert engine.compile(Constraint("json_schema", json.dumps(described)))


def test_a_deep_schema_is_refused_and_a_shallow_one_is_not() -> None:
    schema: Any = {"type": "null"}
    for _ in range(20):
        schema = {"type": "array", "items": schema}
    check_schema(schema)
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with raises_error("invalid_grammar", kind="json_schema"):
        check_schema(schema)


@pytest.mark.parametrize("keyword", ["$ref", "allOf", "enum", "items", "properties", "required", "type"])
def test_a_keyword_with_a_value_of_another_type_is_refused_or_left_to_the_compiler(keyword: str) -> None:
    for value in (5, "x", True, None, [5], [[5]], {"a": 5}):
        with contextlib.suppress(UserError):
            check_schema({"type": "object", "multipleOf": 1, keyword: value})
    with raises_error("invalid_grammar", kind="json_schema") as caught:
        check_schema({"type": "array", "items": {"type": "object", "properties": 5}})
    assert "schema.items " in str(caught.value)


def test_constraints_go_with_neither_least_lengths_nor_ends_that_end_nothing() -> None:
    constraint = Constraint("regex", "a")
    with raises_error("invalid_value", key="min_new_tokens"):
        SamplingParams(4, min_new_tokens=1, constraint=constraint)
    with raises_error("invalid_value", key="ignore_eos"):
        SamplingParams(4, ignore_eos=True, constraint=constraint)


def test_penalties_and_bias_change_the_logits_as_openai_says(engine: TransformersEngine) -> None:
    params = SamplingParams(40, 0, presence_penalty=0.7, frequency_penalty=0.3, logit_bias=((9, 1.5),))
    [[rollout]] = engine.generate([[5, 6, 7]], 1, params)
    completion: list[int] = []
    for token in rollout.completion_ids:
        with torch.no_grad():
            logits = engine.model(torch.tensor([[5, 6, 7, *completion]])).logits[0, -1]
        counts = torch.bincount(torch.tensor(completion, dtype=torch.long), minlength=len(logits))
        logits = logits - 0.7 * (counts > 0) - 0.3 * counts
        logits[9] += 1.5
        assert token == int(logits.argmax())
        completion.append(token)
    assert rollout.logps[-1] < 0  # the model's own, whatever was added


def test_ends_of_a_requests_own(engine: TransformersEngine) -> None:
    plain = engine.generate([[5, 6, 7]], 4, SamplingParams(60, 1.3))[0]
    third = plain[0].completion_ids[2]
    stopped = engine.generate([[5, 6, 7]], 4, SamplingParams(60, 1.3, stop_token_ids=(third,)))[0]
    assert stopped[0].completion_ids == plain[0].completion_ids[:3] or third in plain[0].completion_ids[:2]
    assert all(third not in r.completion_ids[:-1] for r in stopped)
    eos = engine.eos_token_ids[0]
    biased = SamplingParams(10, 1.0, logit_bias=((eos, 100.0),))
    assert engine.generate([[5, 6]], 1, biased)[0][0].completion_ids == [eos]
    ignoring = SamplingParams(10, 1.0, logit_bias=((eos, 100.0),), ignore_eos=True)
    [[rollout]] = engine.generate([[5, 6]], 1, ignoring)
    assert rollout.completion_ids == [eos] * 10 and rollout.finish_reason == "length"


def test_log_probs_of_prompts(engine: TransformersEngine) -> None:
    prompts = [[5, 6, 7, 8], [5, 6, 9], [11], [5, 6, 7, 8]]
    for prompt, found in zip(prompts, engine.prompt_logps(prompts, 3), strict=True):
        with torch.no_grad():
            expected = engine.model(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1]
        assert found.logps == pytest.approx(
            expected.gather(1, torch.tensor(prompt)[1:, None])[:, 0].tolist(), abs=2e-5
        )
        assert [[token for token, _ in top] for top in found.tops] == expected.topk(3).indices.tolist()


def test_without_xgrammar_it_says_what_to_install(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    fresh = TransformersEngine(engine.model, engine.tokenizer)
    with raises_error("missing_package"):
        texts(fresh, SamplingParams(max_new_tokens=4, constraint=Constraint("regex", "a")))
