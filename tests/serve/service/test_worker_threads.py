"""Threads for work that cannot be interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from rlhf_serve.service.worker_threads import Workers

pytestmark = pytest.mark.anyio


async def given_up(workers: Workers, work: Callable[[], object]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await workers.run(work)


async def test_threads_that_are_stuck_are_replaced_and_leave_when_they_come_back() -> None:
    stuck = threading.Event()

    workers = Workers(count=2, most_abandoned=2)
    before = threading.active_count()
    await given_up(workers, stuck.wait)
    await given_up(workers, stuck.wait)
    assert threading.active_count() == before + 2
    assert await workers.run(lambda: 1) == 1  # by a thread in the place of one that is stuck
    await given_up(workers, stuck.wait)
    await given_up(workers, stuck.wait)
    assert threading.active_count() == before + 2  # no more than `most_abandoned`
    await given_up(workers, lambda: 2)  # nobody is left to do it
    stuck.set()
    assert await workers.run(lambda: 3) == 3
    while threading.active_count() > before:
        await asyncio.sleep(0.01)
    workers.close()


async def test_errors_come_back_and_the_thread_stays() -> None:
    def fails() -> None:
        raise KeyError("x")

    workers = Workers(count=1)
    with pytest.raises(KeyError):
        await workers.run(fails)
    assert await workers.run(lambda: 4) == 4
    workers.close()
