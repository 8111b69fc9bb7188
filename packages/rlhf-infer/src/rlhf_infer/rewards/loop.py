"""The event loop of asynchronous reward functions: one per process, in a thread of its own.

It lives as long as the process, so that what a function keeps between calls (an HTTP session, say) stays
usable, and it serves threads without a loop and threads whose own loop is running alike.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

_LOOPS: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}
"""Loop and thread by process number: a forked process has its parent's loop, but not its thread."""
_LOCK = threading.Lock()


def submit(awaitable: Awaitable[Any]) -> Future[Any]:
    """Start an awaitable on the loop.

    Args:
        awaitable: what `await` takes.

    Returns:
        The future of its result; `result()` waits for it.

    Raises:
        ValueError: the caller runs on this loop itself and would wait for itself; it must `await` instead.
    """
    loop, thread = _running_loop()
    if threading.current_thread() is thread:
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise ValueError("an asynchronous reward function waits for another one without `await`")
    return asyncio.run_coroutine_threadsafe(_wait(awaitable), loop)


async def _wait(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _running_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    with _LOCK:
        if os.getpid() not in _LOOPS:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True)
            thread.start()
            _LOOPS[os.getpid()] = loop, thread
        return _LOOPS[os.getpid()]
