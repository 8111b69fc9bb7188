"""The event loop of asynchronous reward functions: one per process, in a separate thread.

It lives as long as the process, so that what a function keeps between calls (an HTTP session, say) stays
usable, and it serves threads without a loop and threads whose own loop is running alike.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

_Value = TypeVar("_Value")
_LOOPS: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}
"""Loop and thread by process number: a forked process has its parent's loop, but not its thread."""
_LOCK = threading.RLock()
"""May be taken again by a finalizer that runs while it is held."""
_KEPT: set[asyncio.Task[Any]] = set()
"""Tasks that nothing waits for, which a loop alone would not keep alive."""
_LOG = logging.getLogger(__name__)
_OURS = str(Path(__file__).parents[1])
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def submit(awaitable: Awaitable[Any]) -> Future[Any]:
    """Start an awaitable on the loop.

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


async def on_loop(coroutine: Coroutine[Any, Any, _Value]) -> _Value:
    """Await a coroutine that runs on the loop, whichever loop the caller runs on; cancelling goes through."""
    if threading.current_thread() is _running_loop()[1]:
        return await coroutine
    return await asyncio.wrap_future(submit(coroutine))


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, _Value]]) -> list[_Value]:
    """The results of coroutines that run at the same time; the first failure ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def submit_soon(start: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Let the loop start a coroutine, without waiting for it; for finalizers, which may run on any thread."""
    loop, _ = _running_loop()

    def begin() -> None:
        task = loop.create_task(start())
        _KEPT.add(task)
        task.add_done_callback(_KEPT.discard)

    loop.call_soon_threadsafe(begin)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; `sys.exit()` in a task that a function made fails that task only."""
    while True:
        try:
            return loop.run_forever()
        except SystemExit:  # asyncio has set it as the task's failure before it lets it through
            continue


async def _wait(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except SystemExit as error:
        raise Exited from error


def _running_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    with _LOCK:
        if os.getpid() not in _LOOPS:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(loop,), name="reward-functions", daemon=True)
            thread.start()
            _LOOPS[os.getpid()] = loop, thread
        return _LOOPS[os.getpid()]


class Exited(Exception):
    """A reward function called `sys.exit()`, its cause: a failure as any other, and not the program's end."""


def raised(error: BaseException) -> str:
    """`raised KeyError: 'a' (rewards.py:12)`; the whole traceback goes to the log.

    The line is the innermost one outside this package, Python's library and installed packages; without such
    a line names none.
    """
    if isinstance(error, Exited) and error.__cause__ is not None:
        error = error.__cause__
    _LOG.info("a reward function raised", exc_info=error)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, *_INSTALLED, "<"))
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{place}"
