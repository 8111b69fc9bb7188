"""Work for a client who may leave, and streams of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rlhf_serve.errors import timed_out

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the response any more."""


async def attended(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientLeft: the client left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


@asynccontextmanager
async def within(seconds: float, since: float) -> AsyncIterator[None]:
    """Give up `seconds` after a request came.

    `since` is when the request came, in seconds of `time.perf_counter`.

    Raises:
        APIError: 504.
    """
    limit = asyncio.timeout(seconds - (time.perf_counter() - since))
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise timed_out(seconds) from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, which end when the client leaves.

    The response begins with the first event: what fails before it is answered with a status.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await attended(receive, self._send(send))
        except ClientLeft:
            return

    async def _send(self, send: Send) -> None:
        begun = False
        async with aclosing(self._events) as events:
            async for text in events:
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                begun = True
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_pauses(queue: asyncio.Queue[T | None], seconds: float, pause: T) -> AsyncIterator[T]:
    """Items of a queue up to None, and `pause` whenever none arrives for that long."""
    while True:
        try:
            async with asyncio.timeout(seconds):
                item = await queue.get()
        except TimeoutError:
            item = pause
        if item is None:
            return
        yield item
