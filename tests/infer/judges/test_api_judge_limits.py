"""Failures that may pass, pauses and limits of the judge behind an API, against a real HTTP server."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import threading
from typing import Any

import pytest

from rlhf_data import UserError
from rlhf_infer import ScorerUnavailable
from rlhf_infer.http_client import TokenBucket, retry_after_s


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503])
def test_it_tries_again_after_a_status_that_may_pass(fake: Any, status: int) -> None:
    def reply(handler: Any, text: str) -> None:
        fake.send(handler, b"busy", status) if len(server.requests) < 3 else fake.certain(handler, text)

    with fake.serve(reply) as server:
        api = fake.judge(server)
        assert fake.score(api, "true!") == [pytest.approx(0.8)]
        assert (api.usage.requests, api.usage.retries) == (3, 2)
        server.requests.clear()
        with pytest.raises(UserError, match=rf"gave no reply in 2 tries, .* status {status} .*'busy'"):
            fake.score(fake.judge(server, max_retries=1), "true!")


def test_pauses(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds > 0.1:  # what the servers of other tests sleep
            waits.append(seconds)
        await sleep(0)

    def reply(handler: Any, text: str) -> None:
        headers = [{"Retry_After": "7"}, {}, {"Retry_After": "soon"}, {"Retry_After": "0"}]
        if len(server.requests) <= 4:
            fake.send(handler, b"", 429, **headers[len(server.requests) - 1])
        else:
            fake.certain(handler, text)

    monkeypatch.setattr(asyncio, "sleep", note)
    with fake.serve(reply) as server:
        assert fake.score(fake.judge(server, backoff=2.0), "true!") == [pytest.approx(0.8)]
    # Pauses of 2, 4, 8 and 16 seconds, shortened by up to a half; the first is 7, as the server asks.
    assert waits[0] == 7.0
    for wait, longest in zip(waits[1:], (4, 8, 16), strict=True):
        assert longest / 2 <= wait <= longest
    assert len({wait / longest for wait, longest in zip(waits[1:], (4, 8, 16), strict=True)}) == 3


def test_a_pause_beyond_the_deadline_is_not_begun(fake: Any) -> None:
    with (
        fake.serve(lambda handler, text: fake.send(handler, b"quota", 429, Retry_After="3600")) as server,
        pytest.raises(ScorerUnavailable, match=r"in 1 tries, .*quota.* in 3600 seconds, beyond the 600"),
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


def test_a_timeout_is_tried_again(fake: Any) -> None:
    release = threading.Event()

    def reply(handler: Any, text: str) -> None:
        if len(server.requests) == 1:
            release.wait()
        fake.certain(handler, text)

    with fake.serve(reply) as server:
        try:
            assert fake.score(fake.judge(server, timeout=0.3), "true!") == [pytest.approx(0.8)]
            assert len(server.requests) == 2
        finally:
            release.set()


def test_nobody_listens(fake: Any) -> None:
    with fake.serve(fake.certain) as server:
        pass
    with pytest.raises(UserError, match=r"gave no reply in 2 tries.*refused.*check base_url"):
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
