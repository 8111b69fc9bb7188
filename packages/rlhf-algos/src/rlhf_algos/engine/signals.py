"""Stopping cleanly on SIGTERM (a scheduler's request), SIGINT (Ctrl-C) and SIGHUP (a closed terminal)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = [signal.SIGTERM, signal.SIGINT]
if sys.platform != "win32":
    _SIGNALS.append(signal.SIGHUP)


class GracefulStop:
    """Turns the first SIGTERM, SIGINT or SIGHUP into a flag; a second one acts at once. A context manager.

    The loop checks the flag after each step.  The handlers from before are restored at the end, and as soon
    as the first signal has come.  A signal that is ignored stays ignored (a background job of a shell
    ignores Ctrl-C, one under nohup SIGHUP).  Python delivers signals to its main thread only: in another
    thread nothing is changed, and only `pass_signal_on` raises the flag.

    Args:
        notice: written to standard error after the first signal's name; empty writes nothing.

    Attributes:
        signal: the signal that came, None until then.
    """

    def __init__(self, notice: str = "finishing this step and saving; once more stops at once") -> None:
        self.notice = notice
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def exit_code(self) -> int | None:
        """Exit status by shell convention: 143 for SIGTERM, 130 for SIGINT, 129 for SIGHUP; or None."""
        return None if self.signal is None else 128 + self.signal

    def __enter__(self) -> Self:
        """Take over the signals, where this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (None, signal.SIG_IGN):  # None: set outside Python
                    self._before[number] = signal.signal(number, self._handle)
        else:
            _UNREACHED.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the handlers back."""
        self._restore()
        if self in _UNREACHED:
            _UNREACHED.remove(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        if self.notice:
            # Unbuffered: a handler may run in the middle of another write. An error: the stream is closed.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self.signal.name}: {self.notice}\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


_UNREACHED: list[GracefulStop] = []
"""Stops created outside the main thread, which receive no signals."""


def pass_signal_on(number: int) -> None:
    """Raise the flags of other threads than the main one, for a signal that came to another process."""
    for stop in _UNREACHED:
        stop.signal = signal.Signals(number)
