"""How a running server behaves: keys, limits, clients who leave, signals, logs."""

from __future__ import annotations

import http.client
import json
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

MODEL = "policy"
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "where is mary ?",
    "max_tokens": 200,
    "min_tokens": 200,
    "best_of": 16,
}
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "where", "max_tokens": 2, "seed": 1}
KEY, OTHER = "a-key-of-sixteen-or-more", "another-key-of-sixteen"


def gauge(server: Any, name: str, headers: dict[str, str] | None = None) -> float:
    text = server.fetch("/metrics", headers=headers)[1]
    found = re.search(rf"^rlhf_serve_{name} ([0-9.e+-]+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


class Call:
    """A request in a thread of its own."""

    def __init__(self, server: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(server.fetch(path, body, headers)))
        self._thread.start()

    def result(self) -> tuple[int, Any, dict[str, str]]:
        self._thread.join()
        return self._found[0]


def test_a_full_queue_answers_429_and_what_was_taken_is_served(server: Any) -> None:
    running = Call(server, "/v1/completions", LONG)
    until(lambda: gauge(server, "running_requests") == 1)
    waiting = Call(server, "/v1/completions", SHORT)
    until(lambda: gauge(server, "queue_depth") == 1)
    status, body, headers = server.fetch("/v1/completions", SHORT)
    assert status == 429 and body["error"]["code"] == "queue_full"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert running.result()[0] == waiting.result()[0] == 200
    assert server.fetch("/v1/completions", SHORT)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_work_ends_when_the_client_leaves(server: Any, stream: bool) -> None:
    before = gauge(server, "cancelled_requests_total")
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    body = json.dumps(LONG | {"best_of": 64, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    until(lambda: gauge(server, "running_requests") == 1)
    connection.close()
    until(lambda: gauge(server, "running_requests") == 0)
    until(lambda: gauge(server, "cancelled_requests_total") == before + 1)
    # Nobody generates for who has left: the next one is served while the first would still run.
    assert server.fetch("/v1/completions", SHORT)[0] == 200


def test_a_client_that_leaves_the_queue_is_forgotten(server: Any) -> None:
    running = Call(server, "/v1/completions", LONG)
    until(lambda: gauge(server, "running_requests") == 1)
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.request("POST", "/v1/completions", json.dumps(SHORT), {"content-type": "application/json"})
    until(lambda: gauge(server, "queue_depth") == 1)
    connection.close()
    until(lambda: gauge(server, "queue_depth") == 0)
    assert running.result()[0] == 200


def test_a_request_that_takes_too_long_is_given_up(start: Callable[..., Any]) -> None:
    server = start("--set", "request_timeout_s=0.05")
    status, body, _ = server.fetch("/v1/completions", LONG | {"selection": "none", "best_of": None, "n": 32})
    assert status == 504 and "0.05 s" in body["error"]["message"]
    stream = LONG | {"selection": "none", "best_of": None, "stream": True}
    status, told, _ = server.fetch("/v1/completions", stream)
    if status == 504:  # not even begun
        assert told["error"]["code"] == "timeout"
    else:
        assert status == 200 and '"code": "timeout"' in told and told.endswith("}}\n\n")
    until(lambda: gauge(server, "running_requests") == 0)
    server.stop()


def test_keys_and_their_limits(start: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may\nalice {KEY}\nbob {OTHER}\n")
    file.chmod(0o600)
    server = start(
        *("--api-keys-file", str(file), "--requests-per-minute", "4", "--max-concurrent-per-key", "1"),
        RLHF_SERVE_API_KEYS="carol third-key-of-sixteen",
    )
    alice, bob = {"authorization": f"Bearer {KEY}"}, {"x-api-key": OTHER}
    for path, body in (("/v1/models", None), ("/v1/completions", SHORT), ("/metrics", None)):
        status, answer, headers = server.fetch(path, body)
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert headers["www-authenticate"] == "Bearer"
    assert server.fetch("/v1/models", headers={"authorization": f"Bearer {KEY}x"})[0] == 401
    assert server.fetch("/health")[0] == server.fetch("/")[0] == 200
    found = [server.fetch("/v1/completions", SHORT, alice) for _ in range(5)]
    assert [status for status, *_ in found] == [200] * 4 + [429]
    assert found[-1][1]["error"]["code"] == "rate_limit_exceeded" and int(found[-1][2]["retry-after"]) >= 1
    running = Call(server, "/v1/completions", LONG | {"best_of": None, "n": 16}, bob)
    carol = {"authorization": "Bearer third-key-of-sixteen"}
    until(lambda: gauge(server, "running_requests", carol) == 1)
    status, answer, _ = server.fetch("/v1/completions", SHORT, bob)
    assert status == 429 and "at a time" in answer["error"]["message"]
    assert running.result()[0] == 200
    log = server.log.read_text()
    assert "key=alice" in log and KEY not in log and OTHER not in log
    server.stop()


@pytest.mark.slow
def test_sigterm_lets_requests_finish(start: Callable[..., Any], folders: Path) -> None:
    server = start("--reward-model", str(folders / "reward"), process=True)
    running = Call(server, "/v1/completions", LONG)
    until(lambda: gauge(server, "running_requests") == 1)
    server.process.send_signal(signal.SIGTERM)
    status, body, _ = running.result()
    assert status == 200 and body["usage"]["candidates"] == 16
    assert server.process.wait() == 0
    assert "Traceback" not in server.log.read_text()


def test_prompts_are_logged_only_when_asked(start: Callable[..., Any], server: Any) -> None:
    body = SHORT | {"prompt": "mary went to kitchen"}
    assert server.fetch("/v1/completions", body)[0] == 200
    until(lambda: "POST /v1/completions 200" in server.log.read_text())
    assert "kitchen" not in server.log.read_text()
    open_server = start("--log-prompts")
    assert open_server.fetch("/v1/completions", body)[0] == 200
    until(lambda: "mary went to kitchen" in open_server.log.read_text())
    open_server.stop()


def test_large_bodies_and_unknown_paths(server: Any) -> None:
    status, body, _ = server.fetch("/v1/completions", SHORT | {"prompt": "x" * (5 << 20)})
    assert status == 413 and "error" in body
    assert server.fetch("/v1/nothing")[0] == 404
    assert server.fetch("/v1/completions", method="PUT", body=SHORT)[0] == 405
    assert server.fetch("/health")[0] == 200


def test_a_server_without_reward(start: Callable[..., Any]) -> None:
    server = start()
    status, body, _ = server.fetch("/v1/completions", SHORT)
    assert status == 200 and body["usage"]["candidates"] == 1 and body["choices"][0]["score"] is None
    for path, sent in (
        ("/v1/completions", SHORT | {"selection": "best"}),
        ("/v1/completions", SHORT | {"budget": 8}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ):
        status, body, _ = server.fetch(path, sent)
        assert status == 400 and "reward" in body["error"]["message"]
    voted = server.fetch("/v1/completions", SHORT | {"selection": "majority", "best_of": 5})[1]
    assert voted["usage"]["candidates"] == 5
    server.stop()


def test_a_server_on_this_machine_answers_to_no_other_name(server: Any) -> None:
    # A web page whose name leads to 127.0.0.1 could otherwise read what the server answers.
    status, body, _ = server.fetch("/v1/models", headers={"host": "evil.example:8000"})
    assert status == 403 and body["error"]["code"] == "wrong_host"
    for name in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert server.fetch("/v1/models", headers={"host": name})[0] == 200


def test_nothing_is_read_from_who_has_no_key(start: Callable[..., Any]) -> None:
    server = start(RLHF_SERVE_API_KEYS=KEY)
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", "1000000")
    connection.endheaders()
    assert connection.getresponse().status == 401  # though no byte of the body was sent
    connection.close()
    server.stop()
