"""What every run's results say of it: where its time went, which versions computed it."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterable

__all__ = ["Clock", "versions"]


class Clock:
    """Seconds spent on each part.

    Args:
        parts: that are named even where nothing is booked on them.
    """

    def __init__(self, *parts: str) -> None:
        self._seconds = dict.fromkeys(parts, 0.0)
        self._started = self._mark = time.perf_counter()

    def lap(self, part: str) -> None:
        """Book the time since the last call on a part."""
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._mark
        self._mark = now

    def split(self) -> dict[str, float]:
        """Seconds by part, and in all."""
        return {**self._seconds, "total": time.perf_counter() - self._started}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of the packages a run's numbers depend on."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
