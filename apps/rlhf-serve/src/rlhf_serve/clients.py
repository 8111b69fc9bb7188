"""Work for a client who may leave, and streams of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rlhf_serve.errors import timed_out


class ClientLeft(Exception):
    """Nobody waits for the response any more."""


async def attended(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which is cancelled when the client leaves.

    Args:
        receive: of the request, whose body has been read.
        work: what the client waits for.

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
async def within(seconds: float) -> AsyncIterator[None]:
    """Give up after so many seconds.

    Raises:
        APIError: 504.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise timed_out(seconds) from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of work that a context holds places for; it ends when the client leaves.

    Args:
        place: entered before anything is sent, so that it may refuse with an error of its own.
        events: gives the events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        place: Callable[[], AbstractAsyncContextManager[Any]],
        events: Callable[[], AsyncIterator[str]],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._place, self._events = place, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await attended(receive, self._send(send))
        except ClientLeft:
            return

    async def _send(self, send: Send) -> None:
        async with self._place():
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for text in self._events():
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_pauses(queue: asyncio.Queue[str | None], seconds: float, pause: str) -> AsyncIterator[str]:
    """What is put into a queue until None comes, and `pause` whenever nothing comes for so long."""
    while True:
        try:
            async with asyncio.timeout(seconds):
                text = await queue.get()
        except TimeoutError:
            text = pause
        if text is None:
            return
        yield text
