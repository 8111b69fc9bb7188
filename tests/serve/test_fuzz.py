"""Malformed requests to the real server with a tiny model: no 500, no hang, and it is well afterwards."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # else pytest rewrites it within a test
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError
from schemathesis import GenerationMode

from malformed_requests import (
    BODIES,
    HANGS_AFTER_S,
    MAX_BODY_BYTES,
    PROMPT,
    Sent,
    check_answer,
    exchange,
    request,
    requests,
)
from proofs import by_default
from rlhf_serve.openai.schema import ChatRequest, CompletionRequest, RewardRequest, ScoreRequest


class Door:
    """The address of the real server."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self._port = int(server.url.rpartition(":")[2])

    def exchange(self, sent: Sent) -> tuple[int, str, bytes] | None:
        """Status, content type and body of the answer; None where the connection was closed without one."""
        return exchange(self._port, sent)

    def post(self, what: str, path: str, body: dict[str, Any]) -> tuple[int, str, bytes] | None:
        """The answer to a body."""
        return self.exchange(request(what, "POST", path, json.dumps(body).encode()))

    def check_well(self) -> None:
        """Requests as they should be are answered, and nothing is left of others."""
        for path, body in BODIES.items():
            answer = self.post("valid", path, body)
            assert answer is not None and answer[0] == 200, (path, answer)
        lines = self.server.fetch("/metrics")[1].splitlines()
        assert {"rlhf_serve_running_requests 0.0", "rlhf_serve_queue_depth 0.0"} <= set(lines)


@pytest.fixture(scope="module")
def door(start: Callable[..., Any], folders: Path) -> Door:
    limits = {
        "max_n": 4,
        "max_tokens": 6,
        "max_scored": 16,
        "max_prompts": 4,
        "max_body_bytes": MAX_BODY_BYTES,
    }
    options = [part for name, value in limits.items() for part in ("--set", f"{name}={value}")]
    return Door(start("--reward-model", str(folders / "reward"), "--n", "2", *options))


@pytest.mark.parametrize("seed", by_default(range(3), 0))
def test_malformed_requests_do_no_harm(door: Door, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    statuses: list[int] = []
    for sent in requests(seed, 100):
        answer = door.exchange(sent)
        if answer is None:
            assert sent.what in ("cut body", "too large", "long header", "many headers"), sent.what
        else:
            check_answer(sent.what, sent.method, *answer)
            statuses.append(answer[0])
    assert sum(status >= 400 for status in statuses) >= 50  # most of them are malformed
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    door.check_well()


@pytest.mark.parametrize(
    ("schema", "base", "field"),
    [
        (CompletionRequest, {"model": "policy"}, "prompt"),
        (CompletionRequest, {"model": "policy", "prompt": ""}, "stop"),
        (ChatRequest, {"model": "policy"}, "messages"),
        (ScoreRequest, {"text_1": ""}, "text_2"),
        (ScoreRequest, {"text_2": ""}, "text_1"),
        (RewardRequest, {}, "query"),
        (RewardRequest, {"query": ""}, "prompts"),
    ],
)
@pytest.mark.parametrize("wrong", [0.5, [0.5] * 100])
def test_wrong_items_are_not_all_listed(schema: Any, base: dict[str, Any], field: str, wrong: Any) -> None:
    """A body of 4 MiB holds a million wrong items; as many errors would take seconds and gigabytes."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(base | {field: [wrong] * 1000})
    assert caught.value.error_count() <= 8


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/chat/completions", {"stop": "\udfff"}),
        ("/v1/chat/completions", {"stop": ["\ud800"]}),
        ("/v1/chat/completions", {"model": "\ud800"}),
        ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/completions", {"prompt": ["so", "\ud800"]}),
        ("/v1/score", {"text_1": "\ud800"}),
        ("/v1/score", {"text_2": ["\ud800", "so"]}),
        ("/get_reward", {"query": "\ud800", "prompts": None}),
    ],
)
def test_text_that_is_no_unicode_is_refused(door: Door, path: str, changes: dict[str, Any]) -> None:
    """Half a surrogate pair, which JSON can write and no tokenizer reads."""
    answer = door.post("surrogate", path, BODIES[path] | changes)
    assert answer is not None and answer[0] in (400, 404)
    check_answer("surrogate", "POST", *answer)


@pytest.mark.parametrize("value", [1e-320, 1e-30, 1e-4])
def test_a_temperature_next_to_nothing_is_answered_or_refused(door: Door, value: float) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = door.post("temperature", path, BODIES[path] | {"temperature": value})
        assert answer is not None and b"NaN" not in answer[2]
        check_answer("temperature", "POST", *answer)


@pytest.mark.slow
def test_a_form_that_compiles_for_long_keeps_nobody_else_waiting(door: Door) -> None:
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": 2}
    ended: list[str] = []

    def ask(name: str, more: dict[str, Any]) -> None:
        answer = door.post(name, "/v1/completions", body | more)
        assert answer is not None and answer[0] == 200
        ended.append(name)

    forms = [[letter * 990 + str(i) for i in range(19)] for letter in "wxyz"]
    threads = [Thread(target=ask, args=("form", {"structured_outputs": {"choice": form}})) for form in forms]
    for thread in threads:
        thread.start()
    ask("plain", {})
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["form"] * 4 + ["plain"] and ended[-1] == "form"


@pytest.mark.parametrize("path", by_default([*BODIES], "/v1/chat/completions"))
@pytest.mark.parametrize(
    "mode", [pytest.param(GenerationMode.NEGATIVE, marks=pytest.mark.slow), GenerationMode.POSITIVE]
)
def test_requests_drawn_from_the_openapi_document_do_no_harm(door: Door, path: str, mode: Any) -> None:
    """Schemathesis' own, with fields that contradict the document or agree with it."""
    schema = schemathesis.openapi.from_dict(door.server.fetch("/openapi.json")[1])

    @settings(
        max_examples=25,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(base_url=door.server.url, timeout=HANGS_AFTER_S)
        content_type = answer.headers.get("content-type", [""])[0]
        check_answer(repr(case.body), case.method, answer.status_code, content_type, answer.content)

    # Hypothesis parses the source of lambdas; a collection in the midst of that can hand the interpreter to
    # another thread that parses too, which CPython 3.11 answers with a SystemError (python/cpython#106905).
    gc.disable()
    try:
        check()
    finally:
        gc.enable()
    door.check_well()
