"""Facts in every run's results: time by part, versions of packages."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import sys
import time
from collections.abc import Iterable

import torch

MACHINE_KEYS = ("step_time", "samples_per_second", "peak_memory_gb")
"""Metrics of every step that tell of the machine, not of the training: `pace` gives them."""


class Clock:
    """Seconds spent on each part.

    Args:
        parts: that are named even if nothing is booked on them.
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


def pace(started: float, samples: int, *, device: torch.device) -> dict[str, float]:
    """The metrics of `MACHINE_KEYS`: what a step took.

    Args:
        started: `time.perf_counter()` at its start.
        samples: how many examples, or sampled completions, all processes worked on in it.
        device: that this process trains on.
    """
    seconds = time.perf_counter() - started
    values = (seconds, samples / seconds, peak_memory_gb(device))
    return dict(zip(MACHINE_KEYS, values, strict=True))


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory of this process so far, in GB (10⁹ bytes): on its GPU, or resident if it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
