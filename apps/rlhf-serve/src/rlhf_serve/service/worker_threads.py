"""Threads for what would hold up the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """A few threads for work that may take long and cannot be interrupted, such as rendering a chat template.

    Work that never ends keeps its thread, so that such work does not pile up, but neither its request, which
    has a deadline, nor the process: the threads are daemons.

    Args:
        count: threads.
    """

    def __init__(self, count: int = 4) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"rlhf-worker-{number}", daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns; cancelling the call leaves alone what has started."""
        result: Future[T] = Future()
        self._work.put((result, work))
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        """End the threads that are idle, the others when they have done their work."""
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            result, work = item
            if not result.set_running_or_notify_cancel():
                continue
            try:
                result.set_result(work())
            except BaseException as error:  # whoever waits is told
                result.set_exception(error)
            del item, result, work  # or the thread would keep what was asked last


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of several coroutines that run at the same time; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
