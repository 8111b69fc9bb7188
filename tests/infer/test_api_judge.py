"""The judge behind an API against a real HTTP server on this machine that speaks OpenAI's protocol."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.server
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_data import UserError
from rlhf_infer import APIJudge, APISettings, Judge
from rlhf_infer.api_judge import TokenBucket
from rlhf_infer.http_post import retry_after_s
from rlhf_infer.judge_cache import JudgeCache
from rlhf_infer.judge_settings import JUDGE_TEMPLATE, NUMBER_TEMPLATE

KEY = "sk-very-secret"
Reply = Callable[[Any, str], None]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


class Server:
    """What a running server was asked, and the most requests it answered at a time."""

    def __init__(self) -> None:
        self.url, self.requests, self.busiest, self._busy = "", [], 0, 0
        self._lock = threading.Lock()

    @property
    def texts(self) -> list[str]:
        return [request["body"]["messages"][0]["content"] for request in self.requests]

    @contextlib.contextmanager
    def answering(self, request: dict[str, Any]) -> Iterator[None]:
        with self._lock:
            self.requests.append(request)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        yield
        with self._lock:
            self._busy -= 1


@contextlib.contextmanager
def serve(reply: Reply) -> Iterator[Server]:
    """An API that answers each text as `reply(handler, text)` does."""
    server = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = {"body": body, "path": self.path, "key": self.headers["Authorization"]}
            with server.answering(request):
                reply(self, body["messages"][0]["content"])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        server.url = f"http://127.0.0.1:{running.server_port}/v1"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            running.shutdown()
            thread.join()


def send(handler: Any, value: Any, status: int = 200, **headers: str) -> None:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(status)
    for name, header in headers.items():
        handler.send_header(name.replace("_", "-"), header)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    with contextlib.suppress(ConnectionError):
        handler.wfile.write(body)


def completion(text: str, logps: dict[str, float] | None = None) -> dict[str, Any]:
    """A chat completion of 100 prompt tokens and one completion token."""
    top = [{"token": token, "logprob": logp} for token, logp in (logps or {}).items()]
    content = [{"token": text, "logprob": -0.1, "top_logprobs": top}]
    return {
        "id": "x",
        "choices": [{"message": {"content": text}, "logprobs": {"content": content} if logps else None}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
    }


def says(value: Any) -> Reply:
    return lambda handler, text: send(handler, value)


def certain(handler: Any, text: str) -> None:
    """Yes at 80 % of the texts that end with "true", else no."""
    p = 0.8 if "true!" in text else 0.2
    send(handler, completion("yes", {"yes": math.log(p), "no": math.log(1 - p)}))


def judge(
    server: Server, *, cache: Path | None = None, template: str | None = None, **settings: Any
) -> APIJudge:
    options = APISettings(**settings)
    return APIJudge(server.url, "m", options, template=template, backoff_s=0.0, cache_folder=cache)


def score(api: Judge, *critiques: str | None) -> list[float]:
    n = len(critiques)
    return api.score(["Where?"] * n, [f"a{i}" for i in range(n)], critiques).tolist()


def test_probability_over_spellings() -> None:
    # (0.3 + 0.1) / (0.3 + 0.1 + 0.2 + 0.2) = 0.5; "not", "Yesterday" and the rest do not count.
    logps = {
        token: math.log(p)
        for token, p in {
            "Yes": 0.3,
            " yes": 0.1,
            "NO": 0.2,
            " No": 0.2,
            "not": 0.1,
            "Yesterday": 0.05,
        }.items()
    }
    # 0.6 / (0.6 + 0.2) = 0.75
    yes = {"yes": math.log(0.6), "no": math.log(0.2)}
    for tops, p in ((logps, 0.5), (yes, 0.75), ({"yes": -1.0}, 1.0), ({" no": -3.0, "so": -1.0}, 0.0)):
        with serve(says(completion("x", tops))) as server:
            assert score(judge(server), "c") == [pytest.approx(p)]


def test_requests_and_result() -> None:
    with serve(certain) as server:
        api = judge(server)
        result = api.score(["q", "q2"], ["a", "a2"], ["true!", None])
    assert result.tolist() == pytest.approx([0.8, 0.2])
    assert (result.dtype, result.shape) == (api.score([], [], []).dtype, (2,))
    assert sorted(server.texts) == sorted(
        [
            JUDGE_TEMPLATE.format(question="q", answer="a", critique="true!"),
            JUDGE_TEMPLATE.format(question="q2", answer="a2", critique="none"),
        ]
    )
    assert {(r["path"], r["key"]) for r in server.requests} == {("/v1/chat/completions", f"Bearer {KEY}")}
    body = server.requests[0]["body"]
    assert body["model"] == "m" and body["max_tokens"] == 1 and len(body["messages"]) == 1
    assert body["logprobs"] is True and body["top_logprobs"] == 20


def test_numbers() -> None:
    for text, p in (("100", 1.0), ("0", 0.0), (" 85\n", 0.85), ("007", 0.07)):
        with serve(says(completion(text))) as server:
            assert score(judge(server, answer="number"), "c") == [pytest.approx(p)]
    assert server.texts == [NUMBER_TEMPLATE.format(question="Where?", answer="a0", critique="c")]
    assert "logprobs" not in server.requests[0]["body"]


@pytest.mark.parametrize("text", ["101", "85%", "0.9", "-1", "about 7", "", "1000", "٣"])
def test_what_is_no_number_is_asked_again_and_then_quoted(text: str) -> None:
    with serve(says(completion(text))) as server:
        api = judge(server, answer="number")
        with pytest.raises(UserError, match="expected a whole number from 0 to 100") as error:
            score(api, "c")
    assert repr(text) in str(error.value) and server.url in str(error.value)
    assert len(server.requests) == 2 and (api.usage.requests, api.usage.retries) == (2, 1)


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        (completion("Perhaps", {"perhaps": -1.0}), "'Perhaps'"),
        (completion("Yes"), "'Yes'"),
        (b"<html>", "'<html>'"),
        ({"choices": []}, "choices"),
        ([1], "'[1]'"),
        (completion("y", {"yes": math.nan}), "'y'"),
        (completion("y", {"yes": 1e9}), "'y'"),
        (completion("y", {"yes": -1e9, "no": -1e9}), "'y'"),
    ],
)
def test_garbage_is_asked_again_and_then_quoted(value: Any, quoted: str) -> None:
    with serve(says(value)) as server:
        with pytest.raises(
            UserError, match=r"replied .* 2 times, without yes or no .* set answer to number"
        ) as e:
            score(judge(server), "c")
        assert quoted in str(e.value) and len(server.requests) == 2


def test_a_second_reply_may_be_usable() -> None:
    with serve(
        lambda handler, text: send(handler, b"{" if len(server.requests) < 2 else completion("7"))
    ) as server:
        api = judge(server, answer="number")
        assert score(api, "c") == [pytest.approx(0.07)]
    assert api.usage.prompt_tokens == 100


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503])
def test_it_tries_again_after_a_status_that_may_pass(status: int) -> None:
    def reply(handler: Any, text: str) -> None:
        send(handler, b"busy", status) if len(server.requests) < 3 else certain(handler, text)

    with serve(reply) as server:
        api = judge(server)
        assert score(api, "true!") == [pytest.approx(0.8)]
        assert (api.usage.requests, api.usage.retries) == (3, 2)
        server.requests.clear()
        with pytest.raises(UserError, match=rf"gave no reply in 2 tries, .* status {status} .*'busy'"):
            score(judge(server, max_retries=1), "true!")


def test_pauses() -> None:
    pauses: list[float] = []

    class NoPause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return False

    def reply(handler: Any, text: str) -> None:
        headers = [{"Retry_After": "7"}, {}, {"Retry_After": "soon"}, {"Retry_After": "0"}]
        if len(server.requests) <= 4:
            send(handler, b"", 429, **headers[len(server.requests) - 1])
        else:
            certain(handler, text)

    with serve(reply) as server:
        api = APIJudge(server.url, "m", APISettings(), backoff_s=2.0)
        assert api._ask("true!", NoPause()) == pytest.approx(0.8)
    waits = [pause for pause in pauses if pause]
    # Pauses of 2, 4, 8 and 16 seconds, shortened by up to a half; the first is 7, as the server asks.
    assert waits[0] == 7.0
    for wait, longest in zip(waits[1:], (4, 8, 16), strict=True):
        assert longest / 2 <= wait <= longest
    assert len({wait / longest for wait, longest in zip(waits[1:], (4, 8, 16), strict=True)}) == 3


def test_a_pause_that_is_too_long_is_told() -> None:
    with (
        serve(lambda handler, text: send(handler, b"quota", 429, Retry_After="3600")) as server,
        pytest.raises(UserError, match=r"wants no request for 3600 seconds: .*quota"),
    ):
        score(judge(server), "c")
    assert len(server.requests) == 1


def test_retry_after_header() -> None:
    now = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    later = now + datetime.timedelta(seconds=90)
    assert retry_after_s("30") == 30.0
    assert retry_after_s(email.utils.format_datetime(later, usegmt=True), now) == 90.0
    assert retry_after_s("Thu, 01 Jan 2026 12:01:30 -0000", now) == 90.0
    assert retry_after_s("Thu, 01 Jan 2026 11:00:00 GMT", now) == 0.0
    assert [retry_after_s(text) for text in (None, "", "soon", "-5", "1.5")] == [None] * 5


def test_a_timeout_is_tried_again() -> None:
    release = threading.Event()

    def reply(handler: Any, text: str) -> None:
        if len(server.requests) == 1:
            release.wait()
        certain(handler, text)

    with serve(reply) as server:
        try:
            assert score(judge(server, timeout=0.3), "true!") == [pytest.approx(0.8)]
            assert len(server.requests) == 2
        finally:
            release.set()


def test_nobody_listens() -> None:
    with serve(certain) as server:
        pass
    with pytest.raises(UserError, match=r"gave no reply in 2 tries.*refused.*check base_url"):
        score(judge(server, max_retries=1), "c")


def test_a_wrong_key_is_refused_at_once_and_never_shown() -> None:
    said = {"error": {"message": f"Incorrect API key provided: {KEY}."}}
    with serve(lambda handler, text: send(handler, said, 401)) as server:
        with pytest.raises(
            UserError, match=r"status 401 .*Incorrect API key .*the key in OPENAI_API_KEY"
        ) as error:
            score(judge(server), "c")
        assert len(server.requests) == 1
    assert KEY not in str(error.value) and "<the API key>" in str(error.value)


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(certain) as server:
        monkeypatch.setenv("OTHER_KEY", f" {KEY}2\n")
        score(judge(server, api_key_env="OTHER_KEY"), "c")
        score(judge(server, api_key_env=None), "c")
        assert [request["key"] for request in server.requests] == [f"Bearer {KEY}2", None]
        monkeypatch.delenv("OTHER_KEY")
        with pytest.raises(UserError, match=r"OTHER_KEY holds no API key .*null for a server without keys"):
            judge(server, api_key_env="OTHER_KEY")
        monkeypatch.setenv("OTHER_KEY", f"{KEY}\nX: y")
        with pytest.raises(UserError, match="expected printable ASCII") as error:
            judge(server, api_key_env="OTHER_KEY")
    assert KEY not in str(error.value)


def test_equal_texts_are_asked_once_in_a_shuffled_order() -> None:
    critiques = [f"c{i % 20}" for i in range(40)]
    with serve(certain) as server:
        api = judge(server, template="{critique}", concurrency=1)
        score(api, *critiques)
        again = judge(server, template="{critique}", concurrency=1)
        score(again, *critiques)
    first, second = server.texts[:20], server.texts[20:]
    assert sorted(first) == sorted(set(critiques)) and first != critiques[:20]
    assert first == second


def test_no_more_requests_at_a_time_than_allowed() -> None:
    # Every request waits until three are there: with two at a time none would ever be answered.
    together = threading.Barrier(3)

    def reply(handler: Any, text: str) -> None:
        together.wait()
        certain(handler, text)

    with serve(reply) as server:
        score(judge(server, concurrency=3), *(f"c{i}" for i in range(12)))
    assert server.busiest == 3


def test_token_bucket() -> None:
    # 30 a minute: one at once, then one every 2 seconds.
    bucket = TokenBucket(30)
    assert [bucket.reserve(100.0) for _ in range(3)] == [0.0, 2.0, 4.0]
    # Three tokens are reserved up to second 104; at second 105 half of the next one is there.
    assert bucket.reserve(105.0) == pytest.approx(1.0)
    # After a long rest it holds one.
    assert [bucket.reserve(1000.0) for _ in range(2)] == [0.0, 2.0]
    # 240 a minute: four in one second, then one every quarter of a second.
    bucket = TokenBucket(240)
    assert [bucket.reserve(0.0) for _ in range(6)] == [0.0, 0.0, 0.0, 0.0, 0.25, 0.5]
    assert [TokenBucket(None).reserve(0.0) for _ in range(9)] == [0.0] * 9


def test_requests_wait_for_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(TokenBucket, "reserve", lambda self, now: pauses.append(now) or 0.0)
    with serve(certain) as server:
        score(judge(server, requests_per_minute=600), "c0", "c1", "c2")
    assert len(pauses) == 3


def test_cost() -> None:
    # 3 requests of 100 prompt tokens at 2.5 and 1 completion token at 10 per million:
    # (300 x 2.5 + 3 x 10) / 1e6 = 0.00078.
    with serve(certain) as server:
        api = judge(server, prompt_price=2.5, completion_price=10)
        score(api, "c0", "c1", "c2")
        assert api.usage.cost == pytest.approx(0.00078)
        assert (api.usage.prompt_tokens, api.usage.completion_tokens) == (300, 3)
        assert (api.usage.requests, api.usage.retries, api.usage.cached) == (3, 0, 0)
        free = judge(server)
        score(free, "c0")
    assert free.usage.cost is None
    with pytest.raises(ValueError, match="give both or neither"):
        APISettings(prompt_price=1)


def test_usage_that_the_server_does_not_report() -> None:
    value = completion("7")
    for usage in ({"prompt_tokens": None}, None, {"prompt_tokens": 3}):
        with serve(says(value | {"usage": usage})) as server:
            api = judge(server, answer="number")
            assert score(api, "c") == [pytest.approx(0.07)]
        assert (api.usage.prompt_tokens, api.usage.completion_tokens) == (0, 0)


def test_cache_across_instances(tmp_path: Path) -> None:
    with serve(certain) as server:
        first = judge(server, cache=tmp_path)
        scores = score(first, "true!", "c1", "c2")
        second = judge(server, cache=tmp_path)
        assert score(second, "true!", "c1", "c2") == scores
        assert len(server.requests) == 3 and first.usage.cached == 0
        assert (second.usage.requests, second.usage.cached) == (0, 3)
        score(judge(server, cache=tmp_path, template="{critique}"), "true!")
        assert len(server.requests) == 4  # another text
        other = APIJudge(server.url, "m2", cache_folder=tmp_path)
        score(other, "true!")
        assert len(server.requests) == 5  # another model
        with pytest.raises(UserError, match="expected a whole number"):  # another method
            score(judge(server, cache=tmp_path, template=JUDGE_TEMPLATE, answer="number"), "true!")
    assert KEY.encode() not in (tmp_path / "judge.sqlite3").read_bytes()


def test_replies_before_a_failure_stay_in_the_cache(tmp_path: Path) -> None:
    def reply(handler: Any, text: str) -> None:
        send(handler, b"no", 400) if "bad" in text else certain(handler, text)

    with serve(reply) as server:
        api = judge(server, cache=tmp_path, concurrency=1, template="{critique}")
        with pytest.raises(UserError, match="status 400"):
            score(api, "c0", "bad", "c1", "c2", "c3")
        good = len(server.requests) - 1
        score(api, "c0", "c1", "c2", "c3")
    assert api.usage.cached == good and len(server.requests) == 5


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from rlhf_infer.judge_cache import JudgeCache
        cache, start = JudgeCache(Path(sys.argv[1])), int(sys.argv[2])
        for i in range(start, start + 200):
            cache.write(str(i), i / 300)
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    workers = [subprocess.Popen([*command, start]) for start in ("0", "100")]
    assert [worker.wait() for worker in workers] == [0, 0]
    found = JudgeCache(tmp_path).read({str(i): f"text {i}" for i in range(301)})
    assert found == {f"text {i}": i / 300 for i in range(300)}


def test_a_broken_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "judge.sqlite3").write_bytes(b"no database" * 100)
    with (
        serve(certain) as server,
        pytest.raises(UserError, match=r"cache .*judge\.sqlite3 cannot be used: .*; remove it"),
    ):
        judge(server, cache=tmp_path)


def test_refusals_at_the_start() -> None:
    with pytest.raises(UserError, match=r"template has the field \{story\}"):
        APIJudge("http://h/v1", "m", template="{story}")
    for url in ("ftp://h", "h:80", ""):
        with pytest.raises(UserError, match=r"judge's URL"):
            APIJudge(url, "m")
    with pytest.raises(UserError, match=r"host h holds a user name") as error:
        APIJudge("http://me:secret@h/v1", "m")
    assert "secret" not in str(error.value)
