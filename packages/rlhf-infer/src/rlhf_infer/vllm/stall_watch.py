"""A watch over vLLM in this process: work that stalls ends in an error rather than in silence."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any, Self

from rlhf_data import UserError

_LOG = logging.getLogger(__name__)


class VLLMStalled(UserError):
    """vLLM in this process made no progress for too long."""

    code = "vllm_stalled"

    def __init__(self) -> None:
        super().__init__(
            "vLLM in this process made no progress within timeout_s; see its messages, raise timeout_s if it "
            "was only slow, or use the server mode, where a vLLM that hangs is started again"
        )


class StallWatch:
    """A context that ends with `VLLMStalled` when the work in it makes no progress.

    Python code is interrupted wherever it is; a call into a library that never returns is not, but the log
    says what is wrong.

    `progress` returns anything that changes while work proceeds; it is called from another thread.
    """

    def __init__(self, progress: Callable[[], Any], timeout_s: float) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._done = threading.Event()
        self._worker = threading.get_ident()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        last = self._progress()
        while not self._done.wait(self._timeout_s):
            before, last = last, self._progress()
            if before == last:
                _LOG.error("vLLM in this process has made no progress for %g s", self._timeout_s)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._worker), ctypes.py_object(VLLMStalled)
                )
                return
