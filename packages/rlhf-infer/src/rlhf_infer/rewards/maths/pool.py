"""Processes that compare formulas, each comparison with a hard time limit."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlhf_data import UserError

_MOST_WORKERS = 4
_START_S = 300.0
"""A worker that has not imported sympy by then does not work."""
_GRACE_S = 5.0
"""Seconds beyond the limit after which a worker ends itself, should nothing be left to end it."""


class MathPool:
    """Up to 4 processes, as many as there are CPU cores, started when there is work for them.

    They live as long as this process; a comparison that takes too long costs its process, and another one is
    started with the next comparison.

    `timeout_s` is what one comparison may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(min(_MOST_WORKERS, count), thread_name_prefix="math-answers")

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Whether two formulas mean the same, for B pairs of the right answer and an answer, in LaTeX.

        Returns:
            B verdicts; None if the comparison took longer than `timeout_s` or too much memory.
        """
        return list(self._threads.map(self._compare, pairs))

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.end()

    def _compare(self, pair: tuple[str, str]) -> bool | None:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self._timeout_s)
        right = worker.ask(pair)
        if worker.ended:
            return right
        with self._lock:
            self._idle.append(worker)
        return right


class _Worker:
    """One process of `rlhf_infer.rewards.maths.worker`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.ended = False
        self._socket, theirs = socket.socketpair()
        # -P: a file in the working directory must not shadow a library.
        command = [sys.executable, "-P", "-m", "rlhf_infer.rewards.maths.worker", f"{timeout_s + _GRACE_S}"]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        if self._line(_START_S) != b"ready":
            self.end()
            raise UserError(
                f"the process that compares formulas does not start ({' '.join(command)} ended with code "
                f"{self._process.returncode}); run it by hand to see why",
                code="engine_not_started",
            )

    def ask(self, pair: tuple[str, str]) -> bool | None:
        """The process's verdict; None, and the process is ended, where it gives none in time."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(pair).encode() + b"\n")
        line = self._line(self._timeout_s)
        if line in (b"true", b"false"):
            return line == b"true"
        self.end()
        return None

    def end(self) -> None:
        """Kill the process."""
        self.ended = True
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _line(self, timeout_s: float) -> bytes:
        """The next line, without its end; empty if the process ended or took longer."""
        until, found = time.monotonic() + timeout_s, b""
        while not found.endswith(b"\n"):
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            try:
                part = self._socket.recv(64)
            except OSError:  # TimeoutError among them
                return b""
            if not part:
                return b""
            found += part
        return found.strip()


_POOLS: dict[tuple[int, float], MathPool] = {}
"""By process number, as a forked process must not share its parent's workers, and time limit."""
_LOCK = threading.Lock()


def math_pool(timeout_s: float) -> MathPool:
    """This process's pool with a time limit."""
    with _LOCK:
        key = os.getpid(), timeout_s
        if key not in _POOLS:
            _POOLS[key] = MathPool(timeout_s)
            atexit.register(_POOLS[key].close)
        return _POOLS[key]
