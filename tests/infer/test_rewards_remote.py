"""The remote scorer against a real HTTP server on this machine."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlhf_data import UserError
from rlhf_infer import ScorerUnavailable
from rlhf_infer.rewards import RewardFunctionFactory as Factory
from rlhf_infer.rewards import RewardFunctions

PROMPTS: list[Any] = ["p0 ", "p1 ", "p2 "]
COMPLETIONS: list[Any] = ["a", "bb", "ccc"]
Reply = Callable[[http.server.BaseHTTPRequestHandler, dict[str, Any]], None]


def say(handler: Any, value: Any, status: int = 200) -> None:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@contextlib.contextmanager
def server(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A scorer; yields its URL and the list of the requests it gets."""
    requests: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"body": body, "path": self.path, "headers": dict(self.headers)})
            reply(self, body)

        def do_GET(self) -> None:
            requests.append({"path": self.path, "get": True})
            say(self, {"rewards": [0, 0, 0]})

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
        with pytest.raises(
            UserError, match=rf"{url} gave no rewards in 2 tries, .* status {status} .*'busy'"
        ):
            score(url, retries=1)


def test_it_tries_again_after_a_broken_connection_and_a_short_answer() -> None:
    def reply(handler: Any, body: dict[str, Any]) -> None:
        if len(requests) == 1:
            handler.connection.close()
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


def test_pauses_double(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    with (
        server(lambda handler, body: say(handler, b"", 502)) as (url, _),
        pytest.raises(UserError, match="in 4 tries"),
    ):
        score(url, backoff_s=0.5, retries=3)
    assert pauses == [0.5, 1.0, 2.0]


def test_a_scorer_that_never_answers_is_given_up() -> None:
    release = threading.Event()

    def reply(handler: Any, body: dict[str, Any]) -> None:
        release.wait()

    with server(reply) as (url, _):
        try:
            with pytest.raises(UserError, match=r"in 1 tries, the last one: no answer in 0\.2 seconds"):
                score(url, timeout_s=0.2, retries=0)
        finally:
            release.set()


def test_nobody_listens() -> None:
    with server(lengths) as (url, _):
        pass
    with pytest.raises(
        ScorerUnavailable,
        match=rf"reward function remote: {url} gave no rewards in 2 tries.*refused.*check that",
    ):
        score(url, retries=1)


def test_a_refusal_is_not_tried_again() -> None:
    with server(lambda handler, body: say(handler, b"no such model", 404)) as (url, requests):
        with pytest.raises(UserError, match=f"{url} refuses the request: status 404 .*no such model"):
            score(url)
        assert len(requests) == 1


def test_a_redirection_is_not_followed_without_the_completions() -> None:
    def reply(handler: Any, body: dict[str, Any]) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with server(reply) as (url, requests):
        with pytest.raises(UserError, match="status 302"):
            score(url)
        assert len(requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"<html>", r"answered '<html>'; expected JSON"),
        ({"scores": [1]}, "expected JSON such as"),
        ([1, 2, 3], "expected JSON such as"),
        ({"rewards": [1, 2]}, "answered 2 rewards for 3 completions"),
        ({"rewards": 1}, "answered a int of rewards"),
        ({"rewards": [1, "x", 2]}, r"sample 1 \(completion 'bb'\): returned str 'x'"),
        (b'{"rewards": [1, NaN, 2]}', r"sample 1 \(completion 'bb'\): returned float nan"),
    ],
)
def test_a_wrong_answer_is_shown(answer: Any, message: str) -> None:
    with server(lambda handler, body: say(handler, answer)) as (url, requests):
        with pytest.raises(UserError, match=message):
            score(url)
        assert len(requests) == 1


def test_columns_that_json_cannot_express() -> None:
    with (
        server(lengths) as (url, _),
        pytest.raises(UserError, match=r"cannot be sent .* bytes .*\(there are a"),
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
    with pytest.raises(UserError, match="reward URL"):
        Factory.remote(url)


def test_refusals_at_the_start() -> None:
    with pytest.raises(UserError, match=r"host example\.org holds a user name") as error:
        Factory.remote("https://me:secret@example.org/x")
    assert "secret" not in str(error.value)
    for options in ({"timeout_s": 0}, {"retries": -1}, {"backoff_s": -1}, {"batch_size": 0}):
        with pytest.raises(UserError, match="expected a timeout above 0"):
            Factory.remote("http://h", **options)
    with pytest.raises(UserError, match="expected one of auto, openrlhf, columns"):
        Factory.remote("http://h", protocol="grpc")
