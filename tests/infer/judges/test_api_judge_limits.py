"""The judge behind an API: failures that may pass, limits, cost and cache."""

from __future__ import annotations

import datetime
import email.utils
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_infer import APIJudge, APISettings
from rlhf_infer.http_client import TokenBucket, retry_after_s
from rlhf_infer.judges.cache import JudgeCache
from rlhf_infer.judges.settings import FENCED_TEMPLATE


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503])
def test_it_tries_again_after_a_status_that_may_pass(fake: Any, status: int) -> None:
    def reply(handler: Any, text: str) -> None:
        fake.send(handler, b"busy", status) if len(server.requests) < 3 else fake.certain(handler, text)

    with fake.serve(reply) as server:
        api = fake.judge(server)
        assert fake.score(api, "true!") == [pytest.approx(0.8)]
        assert (api.usage.requests, api.usage.retries) == (3, 2)
        server.requests.clear()
        with raises_error("scorer_unavailable", tries=2):
            fake.score(fake.judge(server, max_retries=1), "true!")


def test_a_pause_beyond_the_deadline_is_not_begun(fake: Any) -> None:
    with (
        fake.serve(lambda handler, text: fake.send(handler, b"quota", 429, Retry_After="3600")) as server,
        raises_error("scorer_unavailable", tries=1),
    ):
        fake.score(fake.judge(server), "c")
    assert len(server.requests) == 1


def test_retry_after_header() -> None:
    now = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    later = now + datetime.timedelta(seconds=90)
    assert retry_after_s("30") == 30.0
    assert retry_after_s(email.utils.format_datetime(later, usegmt=True), now) == 90.0
    assert retry_after_s("Thu, 01 Jan 2026 12:01:30 -0000", now) == 90.0
    assert retry_after_s("Thu, 01 Jan 2026 11:00:00 GMT", now) == 0.0
    assert [retry_after_s(text) for text in (None, "", "soon", "-5", "1.5")] == [None] * 5


def test_nobody_listens(fake: Any) -> None:
    with fake.serve(fake.certain) as server:
        pass
    with raises_error("scorer_unavailable", tries=2):
        fake.score(fake.judge(server, max_retries=1), "c")


def test_no_more_requests_at_a_time_than_allowed(fake: Any) -> None:
    # Every request waits until three are there: with two at a time none would ever be answered.
    together = threading.Barrier(3)

    def reply(handler: Any, text: str) -> None:
        together.wait()
        fake.certain(handler, text)

    with fake.serve(reply) as server:
        fake.score(fake.judge(server, concurrency=3), *(f"c{i}" for i in range(12)))
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


def test_requests_wait_for_the_bucket(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(TokenBucket, "reserve", lambda self, now: pauses.append(now) or 0.0)
    with fake.serve(fake.certain) as server:
        fake.score(fake.judge(server, requests_per_minute=600), "c0", "c1", "c2")
    assert len(pauses) == 3


def test_cost(fake: Any) -> None:
    # 3 requests of 100 prompt tokens at 2.5 and 1 completion token at 10 per million:
    # (300 x 2.5 + 3 x 10) / 1e6 = 0.00078.
    with fake.serve(fake.certain) as server:
        api = fake.judge(server, prompt_price=2.5, completion_price=10)
        fake.score(api, "c0", "c1", "c2")
        assert api.usage.cost == pytest.approx(0.00078)
        assert (api.usage.prompt_tokens, api.usage.completion_tokens) == (300, 3)
        assert (api.usage.requests, api.usage.retries, api.usage.cached) == (3, 0, 0)
        free = fake.judge(server)
        fake.score(free, "c0")
    assert free.usage.cost is None
    with pytest.raises(ValueError, match="give both or neither"):
        APISettings(prompt_price=1)


def test_usage_that_the_server_does_not_report(fake: Any) -> None:
    value = fake.completion("7")
    for usage in ({"prompt_tokens": None}, None, {"prompt_tokens": 3}):
        with fake.serve(fake.says(value | {"usage": usage})) as server:
            api = fake.judge(server, answer="number")
            assert fake.score(api, "c") == [pytest.approx(0.07)]
        assert (api.usage.prompt_tokens, api.usage.completion_tokens) == (0, 0)


def test_cache_across_instances(fake: Any, tmp_path: Path) -> None:
    with fake.serve(fake.certain) as server:
        first = fake.judge(server, cache=tmp_path)
        scores = fake.score(first, "true!", "c1", "c2")
        second = fake.judge(server, cache=tmp_path)
        assert fake.score(second, "true!", "c1", "c2") == scores
        assert len(server.requests) == 3 and first.usage.cached == 0
        assert (second.usage.requests, second.usage.cached) == (0, 3)
        fake.score(fake.judge(server, cache=tmp_path, template="{critique}"), "true!")
        assert len(server.requests) == 4  # another text
        other = APIJudge(server.url, "m2", cache_folder=tmp_path)
        fake.score(other, "true!")
        assert len(server.requests) == 5  # another model
        with raises_error("unreadable_reply"):  # another method
            fake.score(fake.judge(server, cache=tmp_path, template=FENCED_TEMPLATE, answer="number"), "true!")
    assert fake.KEY.encode() not in (tmp_path / "judge.sqlite3").read_bytes()


def test_replies_before_a_failure_stay_in_the_cache(fake: Any, tmp_path: Path) -> None:
    def reply(handler: Any, text: str) -> None:
        fake.send(handler, b"no", 400) if "bad" in text else fake.certain(handler, text)

    with fake.serve(reply) as server:
        api = fake.judge(server, cache=tmp_path, concurrency=1, template="{critique}")
        with raises_error("scorer_refuses"):
            fake.score(api, "c0", "bad", "c1", "c2", "c3")
        good = len(server.requests) - 1
        fake.score(api, "c0", "c1", "c2", "c3")
    assert api.usage.cached == good and len(server.requests) == 5


@pytest.mark.slow
def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from rlhf_infer.judges.cache import JudgeCache
        cache, start = JudgeCache(Path(sys.argv[1])), int(sys.argv[2])
        for i in range(start, start + 200):
            cache.write(str(i), i / 300)
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    workers = [subprocess.Popen([*command, start]) for start in ("0", "100")]
    assert [worker.wait() for worker in workers] == [0, 0]
    found = JudgeCache(tmp_path).read({str(i): f"text {i}" for i in range(301)})
    assert found == {f"text {i}": i / 300 for i in range(300)}


def test_a_broken_cache_is_named(fake: Any, tmp_path: Path) -> None:
    (tmp_path / "judge.sqlite3").write_bytes(b"no database" * 100)
    with (
        fake.serve(fake.certain) as server,
        raises_error("unusable_cache"),
    ):
        fake.judge(server, cache=tmp_path)
