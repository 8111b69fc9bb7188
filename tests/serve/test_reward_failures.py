"""Rewards that are slow, dead or wrong: others are served meanwhile, and nobody sees their insides."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

MODEL = "policy"
PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "where", "max_tokens": 4, "selection": "none"}
SCORED: dict[str, Any] = {"model": MODEL, "prompt": "where", "max_tokens": 4, "best_of": 2}


class Scorer:
    """A scorer over HTTP that answers only when it may."""

    def __init__(self) -> None:
        self.go, self.asked = threading.Event(), threading.Semaphore(0)
        self.bodies: list[Any] = []
        self.reward: float | None = 1.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.bodies.append(body)
                outer.asked.release()
                outer.go.wait()
                answer = json.dumps({"rewards": [outer.reward] * len(body["query"])}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/get_reward"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    made = Scorer()
    yield made
    made.close()


def in_thread(server: Any, body: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(server.fetch("/v1/completions", body)))
    thread.start()
    return thread, found


def test_a_slow_scorer_stops_nobody_else_and_is_asked_by_all_at_once(
    start: Callable[..., Any], scorer: Scorer
) -> None:
    server = start("--reward-model", scorer.url)
    scored = [in_thread(server, SCORED | {"seed": seed}) for seed in range(3)]
    for _ in range(3):
        assert scorer.asked.acquire(timeout=120)  # all three wait at the scorer at the same time
    # The scorer answers nobody yet; who wants no score is served, to the last token.
    status, text, _ = server.fetch("/v1/completions", PLAIN | {"max_tokens": 100, "stream": True})
    assert status == 200 and text.endswith("data: [DONE]\n\n")
    assert all(thread.is_alive() for thread, _ in scored)
    scorer.go.set()
    for thread, found in scored:
        thread.join()
        assert found[0][0] == 200 and found[0][1]["choices"][0]["score"] == 1.0
    server.stop()


def test_a_dead_scorer_is_a_bad_gateway_and_its_address_stays_in_the_log(start: Callable[..., Any]) -> None:
    with (
        socket.socket() as taken
    ):  # bound but not listening: nobody answers, and no other server gets the port
        taken.bind(("127.0.0.1", 0))
        assert_bad_gateway(start, f"127.0.0.1:{taken.getsockname()[1]}")


def assert_bad_gateway(start: Callable[..., Any], address: str) -> None:
    server = start("--reward-model", f"remote:url=http://{address}/get_reward,retries=1,backoff_s=0.1")
    scored = [in_thread(server, SCORED) for _ in range(3)]
    status, body, _ = server.fetch("/v1/completions", PLAIN)
    assert status == 200 and body["usage"]["completion_tokens"] <= 4
    for thread, found in scored:
        thread.join()
        status, body, headers = found[0]
        assert status == 502 and body["error"]["type"] == "server_error"
        assert body["error"]["code"] == "reward_failed"
        assert address not in json.dumps(body) and "remote" not in json.dumps(body)
        assert headers["x-request-id"] in server.log.read_text()
    assert address in server.log.read_text()
    for path, asked in (
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/get_reward", {"query": ["ab"], "prompts": ["a"]}),
    ):
        status, body, _ = server.fetch(path, asked)
        assert status == 502 and address not in json.dumps(body)
    status, text, _ = server.fetch("/v1/completions", SCORED | {"stream": True})
    assert status == 502 and "reward_failed" in json.dumps(text)
    server.stop()


def test_a_scorer_that_hangs_ends_with_the_deadline(start: Callable[..., Any], scorer: Scorer) -> None:
    server = start("--reward-model", scorer.url, "--set", "request_timeout_s=1")
    status, body, _ = server.fetch("/v1/completions", SCORED)
    assert status == 504 and body["error"]["code"] == "timeout"
    server.stop()


def test_what_a_function_says_when_it_fails_stays_in_the_log(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def judge(completions, **columns):\n    raise RuntimeError('the password is swordfish')\n"
    )
    server = start("--reward-model", f"{tmp_path / 'mine.py'}:judge")
    status, body, _ = server.fetch("/v1/completions", SCORED)
    assert status == 502 and body["error"]["code"] == "reward_failed"
    assert "swordfish" not in json.dumps(body) and "judge" not in json.dumps(body)
    assert "swordfish" in server.log.read_text()
    server.stop()


@pytest.mark.slow
def test_a_hanging_function_holds_up_who_wants_its_score_only(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text(
        "import threading\n\ndef hang(completions, **columns):\n    threading.Event().wait()\n"
    )
    server = start(
        "--reward-model", f"{tmp_path / 'hangs.py'}:hang", "--set", "request_timeout_s=1", process=True
    )
    assert server.fetch("/v1/completions", SCORED)[0] == 504
    assert server.fetch("/v1/completions", PLAIN)[0] == 200
    assert server.stop() == 0  # its thread does not keep the process


def test_columns_for_checked_answers(start: Callable[..., Any]) -> None:
    server = start("--reward-model", "number")
    status, body, _ = server.fetch("/v1/completions", SCORED)
    assert status == 400 and body["error"]["param"] == "reward_columns"
    assert "answer" in body["error"]["message"]
    status, body, _ = server.fetch("/v1/completions", SCORED | {"reward_columns": {"answer": "7"}})
    assert status == 200 and body["choices"][0]["score"] in (0.0, 1.0)
    both = SCORED | {"prompt": ["where", "mary"]}
    status, body, _ = server.fetch("/v1/completions", both | {"reward_columns": {"answer": ["7", "8"]}})
    assert status == 200 and len(body["choices"]) == 2
    status, body, _ = server.fetch("/v1/completions", both | {"reward_columns": {"answer": ["7"]}})
    assert status == 400 and body["error"]["param"] == "reward_columns"
    # An answer that is no number is the request's mistake, and said so.
    status, body, _ = server.fetch("/v1/completions", SCORED | {"reward_columns": {"answer": "x"}})
    assert status == 400 and "number" in body["error"]["message"]
    asked = {"text_1": "2+2=", "text_2": ["4", "5"], "reward_columns": {"answer": ["4", "4"]}}
    assert [row["score"] for row in server.fetch("/v1/score", asked)[1]["data"]] == [1.0, 0.0]
    asked = {"query": ["2+2=4", "2+2=5"], "prompts": ["2+2=", "2+2="], "labels": ["4", "4"]}
    assert server.fetch("/get_reward", asked)[1]["rewards"] == [1.0, 0.0]
    assert server.fetch("/v1/completions", PLAIN)[0] == 200  # nothing is scored
    server.stop()


SOME = """
def some(completions, keep, **columns):
    return [float(len(text)) if keep[0] in text else None for text in completions]
"""


def test_what_nothing_could_score_comes_last_and_nothing_at_all_is_a_bad_gateway(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SOME)
    server = start("--reward-model", f"{tmp_path / 'mine.py'}:some")
    drawn = {**SCORED, "best_of": 8, "n": 8, "seed": 1}
    status, body, _ = server.fetch("/v1/completions", drawn | {"reward_columns": {"keep": ""}})
    texts = [choice["text"] for choice in body["choices"]]
    letter = max("".join(texts), key=lambda each: sum(each in text for text in texts) % 8)
    status, body, _ = server.fetch("/v1/completions", drawn | {"reward_columns": {"keep": letter}})
    scores = [choice["score"] for choice in body["choices"]]
    count = sum(letter in text for text in texts)
    assert status == 200 and 0 < count < 8
    assert scores == [*sorted((len(t) for t in texts if letter in t), reverse=True), *[None] * (8 - count)]

    asked = {"text_1": "a", "text_2": ["x", "yy"], "reward_columns": {"keep": ["y", "y"]}}
    status, body, _ = server.fetch("/v1/score", asked)
    assert [(row["score"], row["scores"]) for row in body["data"]] == [
        (None, {"some": None}),
        (2, {"some": 2}),
    ]

    none = {"reward_columns": {"keep": "€"}}
    for path, body in (
        ("/v1/completions", SCORED | none),
        ("/v1/completions", SCORED | none | {"stream": True}),
        ("/v1/score", asked | {"reward_columns": {"keep": ["€", "€"]}}),
        ("/get_reward", {"prompts": ["a"], "completions": ["b"], "columns": {"keep": ["€"]}}),
    ):
        status, answer, _ = server.fetch(path, body)
        told = json.dumps(answer)
        assert status == 502 and "reward_failed" in told and "server_error" in told, told
        assert "some" not in told and "None" not in told
    assert "all returned None" in server.log.read_text()
    server.stop()


def test_a_trainer_gets_a_number_for_what_a_judge_left_out(start: Callable[..., Any], tmp_path: Path) -> None:
    lines = [SOME, "some.may_leave_out, some.name = True, 'some'"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    server = start("--reward-model", f"{tmp_path / 'mine.py'}:some")
    asked = {"prompts": ["a"] * 3, "completions": ["x", "xyy", "xy"], "columns": {"keep": ["y"] * 3}}
    status, body, _ = server.fetch("/get_reward", asked)
    # The mean of 3 and 2 in place of the first.
    assert status == 200 and body["rewards"] == [2.5, 3.0, 2.0]
    assert body["extra_logs"] == {"some": [None, 3.0, 2.0]}
    server.stop()


def test_a_remote_reward_that_answers_null_is_a_bad_gateway(
    start: Callable[..., Any], scorer: Scorer
) -> None:
    scorer.reward = None
    scorer.go.set()
    server = start("--reward-model", scorer.url)
    for path, asked in (("/v1/completions", SCORED), ("/v1/score", {"text_1": "a", "text_2": "b"})):
        status, body, _ = server.fetch(path, asked)
        assert status == 502 and body["error"]["code"] == "reward_failed"
    server.stop()


def test_a_right_answer_that_a_request_leaves_out_is_its_own_mistake(start: Callable[..., Any]) -> None:
    server = start("--reward-model", "number")
    asked = {"text_1": "2+2=", "text_2": "4", "reward_columns": {"answer": [None]}}
    for path, body in (
        ("/v1/score", asked),
        ("/v1/completions", SCORED | {"reward_columns": {"answer": None}}),
    ):
        status, answer, _ = server.fetch(path, body)
        assert status == 400 and answer["error"]["param"] == "reward_columns"
    server.stop()
