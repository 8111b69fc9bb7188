"""Requests that wait: streams show that they live, one deadline counts from arrival, limits come first."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlhf_serve.http import generate_request as generation

MODEL = "policy"
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "where", "max_tokens": 2, "seed": 1}
KEY = "a-key-of-sixteen-or-more"


@pytest.mark.slow
def test_the_deadline_counts_from_arrival(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in the queue until its deadline gets none of a second one."""
    monkeypatch.setattr(generation, "PAUSE_S", 0.1)
    server = start("--set", "max_running=1", "--set", "request_timeout_s=2")
    server.hold_place(1)  # somebody has the only place, for ever
    status, text, headers = server.fetch("/v1/completions", SHORT | {"stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert text.startswith(": waiting\n\n: waiting\n\n")
    assert json.loads(text.split("data: ")[1])["error"]["code"] == "timeout"
    status, body, _ = server.fetch("/v1/completions", SHORT)
    assert status == 504 and body["error"]["code"] == "timeout"
    assert server.fetch("/v1/score", {"text_1": "a", "text_2": "b"})[0] == 400  # no reward: said at once
    server.hold_place(0)
    assert server.fetch("/v1/completions", SHORT)[0] == 200
    server.stop()


def test_a_wrong_stream_is_refused_with_a_status(server: Any) -> None:
    status, body, _ = server.fetch("/v1/completions", SHORT | {"prompt": "x" * 900, "stream": True})
    assert status == 400 and body["error"]["param"] == "prompt"


def head_only(server: Any, **headers: str) -> int:
    """The status for a request of which no byte of the body is sent."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.putrequest("POST", "/v1/completions")
    for name, value in {"content-type": "application/json", "content-length": "1000", **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


def test_limits_are_looked_at_before_the_body(start: Callable[..., Any]) -> None:
    server = start("--set", "max_running=1", "--max-waiting", "0")
    server.hold_place(1)
    assert head_only(server) == 429
    server.hold_place(0)
    server.stop()
    server = start("--requests-per-minute", "1", RLHF_SERVE_API_KEYS=KEY)
    assert server.fetch("/v1/completions", SHORT, {"x-api-key": KEY})[0] == 200
    assert head_only(server, x_api_key=KEY) == 429
    server.stop()


def test_metrics_and_models_cost_nothing_of_a_keys_limit(start: Callable[..., Any]) -> None:
    server = start("--requests-per-minute", "1", RLHF_SERVE_API_KEYS=KEY)
    key = {"x-api-key": KEY}
    for _ in range(3):
        assert server.fetch("/metrics", headers=key)[0] == server.fetch("/v1/models", headers=key)[0] == 200
    assert server.fetch("/v1/completions", SHORT, key)[0] == 200
    assert server.fetch("/v1/completions", SHORT, key)[0] == 429
    assert server.fetch("/metrics", headers=key)[0] == 200
    server.stop()
