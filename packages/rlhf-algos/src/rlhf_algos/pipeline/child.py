"""Guards a stage's process, so that it ends when the pipeline does, however that ends; standard library only.

`python child.py LOCK LOG WORD...` runs the words with their output appended to LOG, holding LOCK meanwhile.
When standard input ends, which is when the pipeline's process is gone, even after kill -9, the stage's
processes get SIGTERM, and later SIGKILL. A new pipeline's guard waits for the lock, so that no stage ever
runs twice at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_PATIENCE_S = 60.0
"""Between SIGTERM, after which a training writes a checkpoint, and SIGKILL."""


def main(lock: str, log: str, words: Sequence[str]) -> int:
    """Run a command; its exit code, 128 plus the signal's number where one ended it."""
    handle = take_lock(lock)
    if select.select([sys.stdin.fileno()], [], [], 0)[0]:  # the pipeline has ended while this waited
        return 143
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(handle,),
            preexec_fn=_default_signals,
        )
    threading.Thread(target=_end_with_the_pipeline, args=(process,), daemon=True).start()
    code = process.wait()
    _signal_all(process.pid, signal.SIGKILL)  # what it has left behind
    return code if code >= 0 else 128 - code


def take_lock(lock: str, held: Callable[[], None] = lambda: None) -> int:
    """A handle that holds a lock, once no other process does; whoever closes it gives the lock back.

    `held` is called before waiting for another process.
    """
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held()
            fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _end_with_the_pipeline(process: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 1):  # no buffered read: its lock would be held when this process exits
        pass
    _signal_all(process.pid, signal.SIGTERM)
    time.sleep(_PATIENCE_S)
    _signal_all(process.pid, signal.SIGKILL)


def _signal_all(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
