"""Timing of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by part; a part may be timed many times, and no part contains another."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Book the time of this context on a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - started

    def read(self) -> dict[str, float]:
        """Seconds recorded since the last reading, as `time/<part>`."""
        found, self._seconds = self._seconds, {}
        return {f"time/{part}": seconds for part, seconds in found.items()}
