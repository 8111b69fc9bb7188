"""Who waits for a server that does not answer is told so, once in a while."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rlhf_infer import retry_policy
from rlhf_infer.retry_policy import RetryPolicy, Unavailable


def test_long_pauses_are_said_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry_policy, "_last_said", float("-inf"))
    pauses = []

    here, asleep = threading.get_ident(), asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        if threading.get_ident() != here:  # servers of other tests have threads with loops of their own
            return await asleep(seconds)
        pauses.append(seconds)

    async def refused(before: int) -> None:
        raise Unavailable("Connection refused", retry_after_s=0.1 if before == 0 else 5.0)

    monkeypatch.setattr("rlhf_infer.retry_policy.asyncio.sleep", no_sleep)
    with pytest.raises(Unavailable):
        asyncio.run(RetryPolicy(retries=3, backoff_s=0.0).run(refused))
    assert pauses == [0.1, 5.0, 5.0]  # the first is too short to tell, the last comes too soon after
    [said] = caplog.messages
    assert "Connection refused" in said and "5 s" in said
