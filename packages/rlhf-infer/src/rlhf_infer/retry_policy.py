"""Retries of requests after transient failures, with exponential backoff."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypedDict, TypeVar

from rlhf_data import invalid_value

_LONGEST_PAUSE_S = 60.0
"""The longest pause; up to it pauses double."""
_SAID_FROM_S, _SAID_EVERY_S = 3.0, 10.0
"""Pauses that are announced, and seconds between announcements."""
_last_said = -math.inf
_LOG = logging.getLogger(__name__)
_JITTER = random.Random()
"""Of pauses; not seeded, or the processes of a training would come back together."""
_Value = TypeVar("_Value")


class RetryOptions(TypedDict, total=False):
    """The fields of a `RetryPolicy`."""

    retries: int
    backoff_s: float
    deadline_s: float


class Unavailable(Exception):
    """A request that failed for a reason that may pass.

    Args:
        message: what happened.
        retry_after_s: seconds that the server asks to wait; None if it does not say.
        timed_out: whether no answer came in time.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s, self.timed_out = retry_after_s, timed_out
        self.tries = 1
        """Tries that were made until it was given up."""


@dataclass(frozen=True)
class RetryPolicy:
    """Retries of requests after transient failures, with exponential backoff.

    The pause before try n + 1 is `backoff_s` · 2^(n - 1), at most 60 seconds, shortened by up to a half at
    random, so that clients that failed together do not come back together; it is never shorter than the
    server's `Retry-After`.

    Args:
        retries: further tries after the first.
        backoff_s: seconds before the first of them.
        deadline_s: seconds from the first try after which the request is abandoned; a pause that would end
            later is not started.
    """

    retries: int = 3
    backoff_s: float = 1.0
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if min(self.retries, self.backoff_s) < 0 or not self.deadline_s > 0:
            raise invalid_value(
                f"retries {self.retries}, backoff_s {self.backoff_s}, deadline_s {self.deadline_s}; expected "
                "retries and backoff >= 0, and a deadline above 0",
                "retry",
            )

    async def run(self, attempt: Callable[[int], Awaitable[_Value]]) -> _Value:
        """Return `attempt(n)`, where n counts the previous attempts.

        Raises:
            Unavailable: the last try's failure; `tries` says how many there were.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + self.deadline_s
        failure = Unavailable("not tried")
        for before in range(self.retries + 1):
            try:
                async with asyncio.timeout_at(end):
                    return await attempt(before)
            except (Unavailable, TimeoutError) as error:
                failure = error if isinstance(error, Unavailable) else Unavailable("no answer in time")
            failure.tries = before + 1
            asked = failure.retry_after_s or 0.0
            pause = max(asked, min(self.backoff_s * 2**before, _LONGEST_PAUSE_S) * (1 - _JITTER.random() / 2))
            if before == self.retries:
                break
            if clock() + pause > end:
                failure.args = (
                    f"{failure} (the next try would be in {pause:.0f} seconds, beyond the "
                    f"{self.deadline_s:g} for one request)",
                )
                break
            _say_waiting(failure, pause)
            await asyncio.sleep(pause)
        raise failure


def _say_waiting(failure: Unavailable, pause: float) -> None:
    """Tell who waits what for, once in a while: many requests may wait at a time."""
    global _last_said
    now = time.monotonic()
    if pause >= _SAID_FROM_S and now - _last_said >= _SAID_EVERY_S:
        _last_said = now
        _LOG.warning("%s; the next try is in %.0f s (tries so far: %d)", failure, pause, failure.tries)
