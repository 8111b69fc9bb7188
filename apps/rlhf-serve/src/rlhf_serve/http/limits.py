"""Limits on requests: per minute, at a time, and a bounded queue; for one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from rlhf_data import invalid_value
from rlhf_serve.errors import queue_full, rate_limited

Clock = Callable[[], float]
"""Seconds that never go backwards."""

COMPUTING = "computing"
"""Tag of the routes that count against a key's limits and wait in the queue."""
_MAX_BUCKETS = 10_000
_MAX_RETRY_AFTER_S = 60.0
_RECENT = 0.2
"""Weight of the newest duration in the mean that Retry-After is estimated from."""


class RateLimiter:
    """A token bucket per key: `burst` requests at once, then `per_minute`.

    A bucket that is full again is forgotten, so memory grows with the keys seen within the last
    60 burst / per_minute seconds, and never beyond 10,000 buckets (then the one unused for longest goes).

    Args:
        per_minute: requests a minute in the long run; > 0.
        burst: requests at once; >= 1; None: as many as in a minute.
        clock: seconds.
    """

    def __init__(self, per_minute: float, *, burst: int | None = None, clock: Clock = time.monotonic) -> None:
        self.burst = max(1, round(per_minute)) if burst is None else burst
        if not per_minute > 0 or self.burst < 1:
            raise invalid_value(
                f"rate limit: {per_minute} requests a minute, burst {burst}; expected more than 0, and at "
                "least 1",
                "rate_limit",
            )
        self.per_minute = per_minute
        self._per_second = per_minute / 60
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens and the time they were counted, by key; the oldest first."""

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str) -> None:
        """Count one request of `key`.

        Raises:
            APIError: 429 with the seconds until the next request is accepted; such a request does not count.
        """
        now = self._clock()
        self._forget_full(now)
        tokens, before = self._buckets.get(key, (float(self.burst), now))
        tokens = min(self.burst, tokens + (now - before) * self._per_second)
        if tokens < 1:
            raise rate_limited(
                f"more than {self.per_minute:g} requests a minute; slow down", (1 - tokens) / self._per_second
            )
        self._buckets[key] = tokens - 1, now
        self._buckets.move_to_end(key)

    def _forget_full(self, now: float) -> None:
        """Drop the oldest buckets while they are surely full, and one more if there are too many."""
        filled_after = self.burst / self._per_second
        while self._buckets:
            key, (_, before) = next(iter(self._buckets.items()))
            if now - before < filled_after and len(self._buckets) < _MAX_BUCKETS:
                return
            del self._buckets[key]


class ConcurrencyLimiter:
    """At most `limit` concurrent requests per key; finished ones leave no trace."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise invalid_value(f"concurrency limit: {limit}; expected at least 1", "concurrency")
        self.limit = limit
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Count one request of `key` for as long as the context lasts.

        Raises:
            APIError: 429, there are `limit` already.
        """
        if self._held[key] >= self.limit:
            raise rate_limited(f"more than {self.limit} requests at a time; wait for one to end", 1)
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]


class Admission:
    """A bounded queue: some requests run, some wait, first come first served; further ones are refused."""

    def __init__(self, max_running: int, max_waiting: int, *, clock: Clock = time.monotonic) -> None:
        if max_running < 1 or max_waiting < 0:
            raise invalid_value(
                f"queue: {max_running} running and {max_waiting} waiting at most; expected at least 1 and 0",
                "queue",
            )
        self.max_running, self.max_waiting = max_running, max_waiting
        self.running = 0
        """Contexts that are entered now."""
        self._clock = clock
        self._queue: deque[asyncio.Future[None]] = deque()
        self._mean_s = 1.0  # seconds for one; a guess until some have been served

    @property
    def waiting(self) -> int:
        """The number of requests that wait to enter."""
        return len(self._queue)

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[float]:
        """Wait for a place, and have it for as long as the context lasts.

        One that is cancelled while it waits leaves the queue at once.

        Yields:
            Seconds waited.

        Raises:
            APIError: 429 `queue_full`, with an estimate of when there will be room.
        """
        asked = self._clock()
        await self._acquire()
        began = self._clock()
        try:
            yield began - asked
        finally:
            self._mean_s += _RECENT * (self._clock() - began - self._mean_s)
            self._release()

    def retry_after_s(self) -> float:
        """Estimated seconds until there is room, from the recent time for one request; from 1 to 60."""
        return min(_MAX_RETRY_AFTER_S, max(1.0, self._mean_s * (self.waiting + 1) / self.max_running))

    def check(self) -> None:
        """Refuse a request that would exceed the limits now.

        Raises:
            APIError: as `enter`.
        """
        if self.running >= self.max_running and self.waiting >= self.max_waiting:
            raise queue_full(self.retry_after_s())

    async def _acquire(self) -> None:
        self.check()
        if self.running < self.max_running:
            self.running += 1
            return
        future = asyncio.get_running_loop().create_future()
        self._queue.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # its place was given to it already
                self._release()
            elif future in self._queue:
                self._queue.remove(future)
            raise

    def _release(self) -> None:
        """Give the place to the first that waits, or leave it empty."""
        while self._queue:
            future = self._queue.popleft()
            if not future.cancelled():
                future.set_result(None)
                return
        self.running -= 1
