"""Worker threads for calls that would block the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """A few threads for work that may take long and cannot be interrupted, such as rendering a chat template.

    Work that never ends keeps its thread, but neither its request, which has a deadline, nor the process: the
    threads are daemons. The requests after it get another thread in its place, up to a limit.

    At most `most_abandoned` threads are replaced while they work on.
    """

    def __init__(self, count: int = 4, most_abandoned: int = 32) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._count, self._most_abandoned = count, most_abandoned
        self._abandoned: set[Future[Any]] = set()
        self._lock = threading.Lock()
        for _ in range(count):
            self._start()

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; cancelling the call does not interrupt work that has started."""
        result: Future[T] = Future()
        self._work.put((result, work))
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            with self._lock:
                if result.running() and len(self._abandoned) < self._most_abandoned:
                    self._abandoned.add(result)
                    self._start()
            raise

    def close(self) -> None:
        """End idle threads now, and the others when their work is done."""
        for _ in range(self._count):
            self._work.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._run, name="rlhf-worker", daemon=True).start()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            result, work = item
            if not result.set_running_or_notify_cancel():
                continue
            value, failure = None, None
            try:
                value = work()
            except BaseException as error:  # for the one who waits
                failure = error
            with self._lock:
                replaced = result in self._abandoned
                self._abandoned.discard(result)
                if failure is None:
                    result.set_result(value)
                else:
                    result.set_exception(failure)
            if replaced:
                return
            del item, result, work, value, failure  # or the thread would keep the last request
