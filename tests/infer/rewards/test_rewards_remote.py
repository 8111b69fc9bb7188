"""The remote scorer against a real HTTP server on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.server
import inspect
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raises import raises_error
from rlhf_infer import ScorerUnavailable
from rlhf_infer.rewards import RewardFunctionFactory as Factory
from rlhf_infer.rewards import RewardFunctions

PROMPTS: list[Any] = ["p0 ", "p1 ", "p2 "]
COMPLETIONS: list[Any] = ["a", "bb", "ccc"]
Reply = Callable[[http.server.BaseHTTPRequestHandler, dict[str, Any]], object]


def say(handler: Any, value: Any, status: int = 200) -> None:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@contextlib.contextmanager
def server(reply: Reply, get: Any = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A scorer; yields its URL and the list of the requests it gets."""
    requests: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"body": body, "path": self.path, "headers": dict(self.headers)})
            reply(self, body)

        def do_GET(self) -> None:
            requests.append({"path": self.path, "get": True})
            say(self, {"rewards": [0, 0, 0]} if get is None else get)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", requests
        finally:
            running.shutdown()
            thread.join()


def lengths(handler: Any, body: dict[str, Any]) -> None:
    texts = body.get("completions") or body["query"]
    say(handler, {"rewards": [len(text) for text in texts]})


def score(url: str, columns: Any = None, **options: Any) -> list[float]:
    options = {"backoff_s": 0.0} | options
    together = RewardFunctions([Factory.remote(url, **options)])
    columns = {"answer": ["x", "y", "z"]} if columns is None else columns
    return together(PROMPTS, COMPLETIONS, completion_ids=[[1]] * 3, columns=columns).total.tolist()


def test_own_protocol() -> None:
    with server(lengths) as (url, requests):
        assert score(f"{url}/score?x=1", headers={"Authorization": "Bearer t"}) == [1.0, 2.0, 3.0]
    [request] = requests
    assert request["body"] == {
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "columns": {"answer": ["x", "y", "z"]},
    }
    assert request["path"] == "/score?x=1" and request["headers"]["Authorization"] == "Bearer t"
    assert request["headers"]["Content-Type"] == "application/json"


def test_openrlhf_protocol() -> None:
    with server(lengths) as (url, requests):
        assert score(f"{url}/get_reward") == [4.0, 5.0, 6.0]
        assert score(url, columns={}, protocol="openrlhf") == [4.0, 5.0, 6.0]
    queries = ["p0 a", "p1 bb", "p2 ccc"]
    assert requests[0]["body"] == {"query": queries, "prompts": PROMPTS, "labels": ["x", "y", "z"]}
    assert requests[1]["body"] == {"query": queries, "prompts": PROMPTS}


def test_none_is_not_applicable() -> None:
    with server(lambda handler, body: say(handler, {"rewards": [1, None, 2.5]})) as (url, _):
        together = RewardFunctions([Factory.remote(url), lambda completions: [1, 1, 1]])
        scores = together(PROMPTS, COMPLETIONS, completion_ids=[[1]] * 3, columns={})
    assert scores.total.tolist() == [2.0, 1.0, 3.5] and scores.rewards[0].isnan().tolist() == [0, 1, 0]


def test_batches_are_sent_at_the_same_time_and_come_back_in_order() -> None:
    # Every request waits until all three are there.
    together = threading.Barrier(3)

    def reply(handler: Any, body: dict[str, Any]) -> None:
        together.wait()
        lengths(handler, body)

    with server(reply) as (url, requests):
        assert score(url, batch_size=1) == [1.0, 2.0, 3.0]
    assert sorted(r["body"]["columns"]["answer"] for r in requests) == [["x"], ["y"], ["z"]]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_it_tries_again_after_a_status_that_may_pass(status: int) -> None:
    def reply(handler: Any, body: dict[str, Any]) -> None:
        say(handler, b"busy", status) if len(requests) < 3 else lengths(handler, body)

    with server(reply) as (url, requests):
        assert score(url, retries=2) == [1.0, 2.0, 3.0]
        assert len(requests) == 3
        requests.clear()
        with raises_error("scorer_unavailable", tries=2):
            score(url, retries=1)


def test_it_tries_again_after_a_broken_connection_and_a_short_answer() -> None:
    def reply(handler: Any, body: dict[str, Any]) -> None:
        if len(requests) == 1:
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
        elif len(requests) == 2:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b"{")
            handler.close_connection = True
        else:
            lengths(handler, body)

    with server(reply) as (url, requests):
        assert score(url) == [1.0, 2.0, 3.0]
        assert len(requests) == 3


def pauses_of(monkeypatch: pytest.MonkeyPatch, reply: Reply, **options: Any) -> list[float]:
    """The pauses between tries of a scorer that fails, of which none is waited for."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds > 0.1:  # what the servers of other tests sleep
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    with server(reply) as (url, _), pytest.raises(ScorerUnavailable):
        score(url, **options)
    return pauses


def test_pauses_double_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"backoff_s": 0.5, "retries": 3}
    pauses = pauses_of(monkeypatch, lambda handler, body: say(handler, b"", 502), **options)
    # 0.5, 1 and 2 seconds, each shortened by up to a half at random.
    for pause, longest in zip(pauses, (0.5, 1.0, 2.0), strict=True):
        assert longest / 2 <= pause <= longest
    assert len({pause / longest for pause, longest in zip(pauses, (0.5, 1.0, 2.0), strict=True)}) == 3


def test_the_scorer_says_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(handler: Any, body: dict[str, Any]) -> None:
        handler.send_response(429)
        handler.send_header("Retry-After", "20")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    assert pauses_of(monkeypatch, reply, backoff_s=0.5, retries=3) == [20.0, 20.0, 20.0]
    # A pause that would end behind the deadline is not begun.
    assert pauses_of(monkeypatch, reply, backoff_s=0.5, retries=3, deadline_s=15.0) == []


def test_a_scorer_that_is_slow_is_given_up_at_the_deadline() -> None:
    release = threading.Event()
    with server(lambda handler, body: release.wait() and None) as (url, _):
        try:
            with raises_error("scorer_unavailable"):
                score(url, deadline_s=0.3)
        finally:
            release.set()


def test_a_connection_is_kept_and_no_more_requests_run_than_allowed() -> None:
    ports: set[int] = set()
    together = threading.Barrier(2)

    def reply(handler: Any, body: dict[str, Any]) -> None:
        ports.add(handler.client_address[1])
        together.wait()
        lengths(handler, body)

    with server(reply) as (url, requests):
        reward = RewardFunctions([Factory.remote(url, batch_size=1, concurrency=2)])
        for _ in range(3):
            reward(["p"] * 4, ["a"] * 4, completion_ids=[[1]] * 4, columns={})
    assert len(requests) == 12 and len(ports) == 2


def test_it_is_awaited_on_any_loop() -> None:
    with server(lengths) as (url, _):
        reward: Any = Factory.remote(url)
        assert inspect.iscoroutinefunction(type(reward).__call__)
        for _ in range(2):
            assert asyncio.run(reward(PROMPTS, COMPLETIONS)) == [1, 2, 3]


def test_messages_go_as_messages_to_a_server_of_our_own(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [[{"role": "user", "content": "hi"}]]
    completions = [[{"role": "assistant", "content": "ho"}]]
    for owner, path, protocol in (("rlhf", "/get_reward", "columns"), ("x", "/a/get_reward", "openrlhf")):

        def reply(handler: Any, body: dict[str, Any]) -> None:
            say(handler, {"rewards": [1.0]})

        models = {"data": [{"id": "m", "owned_by": owner}]}
        with server(reply, get=models) as (url, requests):
            reward: Any = Factory.remote(url + path)
            for _ in range(2):
                assert asyncio.run(reward(prompts, completions)) == [1.0]
        assert reward.protocol == protocol
        assert ("protocol=columns" in caplog.text) == (protocol == "openrlhf")  # texts without a template
        assert [request.get("path") for request in requests] == [
            path.removesuffix("/get_reward") + "/v1/models",
            path,
            path,
        ]
        if protocol == "columns":
            assert requests[1]["body"] == {"prompts": prompts, "completions": completions, "columns": {}}
        else:
            assert requests[1]["body"] == {"query": ["hiho"], "prompts": ["hi"]}


def test_a_scorer_that_never_answers_is_given_up() -> None:
    release = threading.Event()

    def reply(handler: Any, body: dict[str, Any]) -> None:
        release.wait()

    with server(reply) as (url, _):
        try:
            with raises_error("scorer_unavailable", tries=1):
                score(url, timeout_s=0.2, retries=0)
        finally:
            release.set()


def test_nobody_listens() -> None:
    with server(lengths) as (url, _):
        pass
    with raises_error("scorer_unavailable", tries=2):
        score(url, retries=1)


def test_a_refusal_is_not_tried_again() -> None:
    with server(lambda handler, body: say(handler, b"no such model", 404)) as (url, requests):
        with raises_error("scorer_refuses"):
            score(url)
        assert len(requests) == 1


def test_a_redirection_is_not_followed_without_the_completions() -> None:
    def reply(handler: Any, body: dict[str, Any]) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with server(reply) as (url, requests):
        with raises_error("scorer_refuses"):
            score(url)
        assert len(requests) == 1


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"<html>", "unreadable_reply"),
        ({"scores": [1]}, "unreadable_reply"),
        ([1, 2, 3], "unreadable_reply"),
        ({"rewards": [1, 2]}, "wrong_number_of_rewards"),
        ({"rewards": 1}, "wrong_number_of_rewards"),
        ({"rewards": [1, "x", 2]}, "invalid_reward"),
        (b'{"rewards": [1, NaN, 2]}', "invalid_reward"),
    ],
)
def test_a_wrong_answer_is_shown(answer: Any, code: str) -> None:
    with server(lambda handler, body: say(handler, answer)) as (url, requests):
        with raises_error(code):
            score(url)
        assert len(requests) == 1


def test_an_answer_nested_too_deeply_is_the_scorers_failure() -> None:
    with (
        server(lambda handler, body: say(handler, b"[" * 200_000)) as (url, _),
        raises_error("unreadable_reply") as error,
    ):
        score(url)
    assert url in str(error.value) and "completion '" not in str(error.value)


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_does_not_end_is_not_read_on(status: int) -> None:
    sent = 0

    def endless(handler: Any, body: dict[str, Any]) -> None:
        nonlocal sent
        handler.close_connection = True
        handler.send_response(status)
        handler.end_headers()
        with contextlib.suppress(OSError):
            while sent < 2**28:
                sent += handler.wfile.write(b" " * 2**20)

    with (
        server(endless) as (url, requests),
        raises_error("scorer_refuses") as error,
    ):
        score(url)
    assert url in str(error.value) and len(requests) == 1
    assert sent < 2**28


def test_a_packed_answer_is_unpacked() -> None:
    def packed(handler: Any, body: dict[str, Any]) -> None:
        answer = gzip.compress(b'{"rewards": [1, 2, 3]}')
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)

    with server(packed) as (url, _):
        assert score(url) == [1.0, 2.0, 3.0]


def test_columns_that_json_cannot_express() -> None:
    with (
        server(lengths) as (url, _),
        raises_error("not_json"),
    ):
        score(url, columns={"a": [b"x", b"y", b"z"]})


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(lengths) as (proxy, asked), server(lengths) as (url, _):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        assert score(url) == [1.0, 2.0, 3.0]
        assert score(url.replace("127.0.0.1", "localhost")) == [1.0, 2.0, 3.0]
        assert not asked
        assert score("http://scorer.invalid/x") == [1.0, 2.0, 3.0]
        assert asked[0]["path"] == "http://scorer.invalid/x"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "localhost:80", "http://h:99999/", "http://[::1/"])
def test_urls_that_are_none(url: str) -> None:
    with raises_error("invalid_url"):
        Factory.remote(url)


def test_refusals_at_the_start() -> None:
    with raises_error("user_name_in_url") as error:
        Factory.remote("https://me:secret@example.org/x")
    assert "secret" not in str(error.value)
    for options in (
        {"timeout_s": 0},
        {"deadline_s": 0},
        {"concurrency": 0},
        {"retries": -1},
        {"backoff_s": -1},
        {"batch_size": 0},
    ):
        with raises_error("invalid_value"):
            Factory.remote("http://h", **options)
    with raises_error("invalid_value", key="protocol"):
        Factory.remote("http://h", protocol="grpc")
