"""Signals that wait for the end of a step: vLLM cannot go on after one that was broken off in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class SignalsHeld:
    """A context in which Python's signal handlers wait for `deliver`, or for the end of the context.

    A signal that comes again while it waits is answered at once, so that Ctrl-C twice ends even a step that
    hangs. Outside the main thread, where Python handles no signals, nothing is held.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.deliver()

    def deliver(self) -> None:
        """Answer the signals that wait, the first one first; what their handlers raise is raised here."""
        while self._waiting:
            number = self._waiting.pop(0)
            self._handlers[number](number, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number in self._waiting:
            self._handlers[number](number, frame)
        else:
            self._waiting.append(number)
