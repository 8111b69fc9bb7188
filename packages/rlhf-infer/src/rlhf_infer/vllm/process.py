"""A vLLM server as a child process: started, watched, started again, and ended with its parent."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from rlhf_data import UserError
from rlhf_infer.vllm import worker as vllm_worker
from rlhf_infer.vllm.client import VLLMClient
from rlhf_infer.vllm.settings import INSTALL, VLLMSettings, require_vllm
from rlhf_infer.vllm.starting import not_started

_LOG = logging.getLogger(__name__)
_HOST = "127.0.0.1"
_WORKER = "rlhf_vllm_worker"
_PROGRESS_S = 15.0
_STOP_S = 15.0
_TAIL_LINES = 20


class VLLMServer:
    """A vLLM server on this machine, for `VLLMServerEngine`; a context manager that starts and stops it.

    It listens on the loopback address only, with vLLM's development routes open (weights are synced through
    them), and ends when this process ends, in whatever way.

    Args:
        model_folder: folder or hub name of the model, with its tokenizer; `write_weight_folder` makes one.
        settings: size and shape; None for the defaults.
        python: the Python to run it with, which must have vLLM; None for this one.
        port: None takes a free one.
        start_timeout_s: longest wait for it to be ready.
        log_path: file its messages are added to; None makes a temporary one.
    """

    def __init__(
        self,
        model_folder: str | Path,
        settings: VLLMSettings | None = None,
        *,
        python: str | None = None,
        port: int | None = None,
        start_timeout_s: float = 600.0,
        log_path: str | Path | None = None,
    ) -> None:
        if python is None:
            require_vllm()
        local = Path(model_folder)
        self.model = str(local.resolve() if local.exists() else model_folder)
        self.settings = settings or VLLMSettings()
        self.port = port or _free_port()
        self.url = f"http://{_HOST}:{self.port}"
        self.start_timeout_s = start_timeout_s
        self._python = python or sys.executable
        self._folder = Path(tempfile.mkdtemp(prefix="rlhf-vllm-server-"))
        shutil.copyfile(vllm_worker.__file__, self._folder / f"{_WORKER}.py")
        self.log_path = Path(log_path) if log_path else self._folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server, which also names its process group; None while it is not started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and wait until it is ready; nothing if it is started already.

        Raises:
            UserError: it ended or was not ready in time; the last lines of its log are shown.
        """
        if self._process is not None:
            return
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self._folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.kill)
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def restart(self) -> None:
        """Kill the server, in whatever state it is, and start it again at the same address.

        Raises:
            UserError: see `start`.
        """
        self.kill()
        self.start()

    def stop(self) -> None:
        """End the server and remove its temporary files."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the server and its children at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        atexit.unregister(self.kill)

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        if not self.log_path.is_file():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _command(self) -> list[str]:
        arguments: dict[str, Any] = {
            "model": self.model,
            "host": _HOST,
            "port": self.port,
            "worker_extension_cls": f"{_WORKER}.WorkerExtension",
            "disable_uvicorn_access_log": True,
            **self.settings.engine_arguments(),
        }
        command = [self._python, "-m", _WORKER]
        for name, value in arguments.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return command

    def _environment(self) -> dict[str, str]:
        paths = [str(self._folder), os.environ.get("PYTHONPATH", "")]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            vllm_worker.PARENT: str(os.getpid()),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        client = VLLMClient(self.url)
        begun = reported = time.monotonic()
        while not client.healthy():
            waited = time.monotonic() - begun
            if process.poll() is not None:
                if process.returncode == vllm_worker.NO_VLLM:
                    raise UserError(f"{self._python}: {INSTALL}", code="missing_package")
                if process.returncode == vllm_worker.SMALL_HEADS:
                    reason = self.log_tail().rpartition("\n")[2]
                    raise not_started(self.model, vllm_worker.SmallHeadsError(reason))
                raise UserError(
                    f"the vLLM server for {self.model} ended while starting, with status "
                    f"{process.returncode}; the end of its log {self.log_path}:\n{self.log_tail()}",
                    code="server_ended",
                )
            if waited > self.start_timeout_s:
                raise UserError(
                    f"the vLLM server for {self.model} was not ready within {self.start_timeout_s:g} s; "
                    f"raise start_timeout_s; the end of its log {self.log_path}:\n{self.log_tail()}",
                    code="server_not_ready",
                )
            if time.monotonic() - reported > _PROGRESS_S:
                reported = time.monotonic()
                _LOG.info("starting vLLM, %.0f s: %s", waited, self.log_tail().rpartition("\n")[2])
            time.sleep(0.25)
        _LOG.info("vLLM is ready at %s after %.0f s", self.url, time.monotonic() - begun)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_HOST, 0))
        return found.getsockname()[1]
