"""The commands in processes: forks of one that has the imports done, or fresh ones."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_server import CommandServer, command_server

HANGS_AFTER = 300.0
"""Seconds; far more than any command here needs on a busy machine."""
_SETUP = """
import contextlib, importlib, runpy
import peft, rlhf_algos.jobs.training_job, rlhf_eval, rlhf_merge.cli.commands, rlhf_merge.files.writer
import rlhf_serve.cli.serve, rlhf_train.commands.training, rlhf_train.display.training
import transformers.models.llama.modeling_llama
from rlhf_merge.cli.main import main as merge
from rlhf_serve.cli.main import main as serve
from rlhf_train.cli import main as train
with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(ImportError):
    importlib.import_module("deepspeed")  # accelerate imports it where a model is saved
rlhf_eval.training_curves = lambda *args, **options: None  # drawing is most of so small a run
rlhf_merge.files.writer._FLUSH_SECONDS = 0.02  # so that a killed merge leaves something to resume
COMMANDS = {"rlhf-merge": merge, "rlhf-serve": serve, "rlhf-train": train}

def main(arguments, prog_name):
    command, prelude, *rest = arguments
    if prelude:
        runpy.run_path(prelude)
    COMMANDS[command](rest, prog_name=command)
"""
_FRESH = """
import runpy, sys
command, prelude, module, name, *rest = sys.argv[1:]
if prelude:
    runpy.run_path(prelude)
import importlib
getattr(importlib.import_module(module), name)(rest, prog_name=command)
"""
_ENTRIES = {
    "rlhf-merge": ("rlhf_merge.cli.main", "main"),
    "rlhf-serve": ("rlhf_serve.cli.main", "main"),
    "rlhf-train": ("rlhf_train.cli", "main"),
}


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code, the negative signal that ended it.
        said: what it printed.
        seconds: how long it took.
        hung: whether it had to be killed after `HANGS_AFTER`.
    """

    code: int
    said: str
    seconds: float
    hung: bool


class Started:
    """A command at work.

    Args:
        process: its number.
        log: what it prints.
        wait: waits for its end; the exit code.
    """

    def __init__(self, process: int, log: Path, wait: Callable[[], int]) -> None:
        self.process, self.log = process, log
        self._wait, self._began = wait, time.monotonic()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if the command has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, number)

    def running(self) -> bool:
        """Whether it has not ended yet."""
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        return Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def ended(self, limit: float = HANGS_AFTER) -> Ended:
        """Wait until the command ends; after the timeout it is killed and counts as hung."""
        hung = threading.Event()

        def give_up() -> None:
            hung.set()
            self.kill()

        timer = threading.Timer(limit, give_up)
        timer.start()
        try:
            code = self._wait()
        finally:
            timer.cancel()
        said = self.log.read_text(errors="backslashreplace") if self.log.exists() else ""
        return Ended(code, said, time.monotonic() - self._began, hung.is_set())


class Commands:
    """Starts commands.

    Args:
        folder: for what they print.
        stack: ends the servers they are forks of.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._lanes: dict[str, CommandServer] = {}
        self._count = 0

    def start(
        self,
        words: Sequence[Any],
        *,
        lane: str = "first",
        prelude: Path | None = None,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> Started:
        """Start a command, whose name is the first word.

        Args:
            words: the command line.
            lane: commands of one lane must not overlap; each has a server of its own.
            prelude: Python file that the process runs first.
            environment: further variables.
            fresh: in a process that has nothing imported.
        """
        self._count += 1
        log = self._folder / f"{self._count}.log"
        command, *rest = map(str, words)
        variables = {"XDG_CACHE_HOME": str(self._folder / "cache"), **(environment or {})}
        if fresh:
            return self._fresh(command, rest, log, prelude, variables)
        if lane not in self._lanes:
            self._lanes[lane] = self._stack.enter_context(command_server("commands", _SETUP))
        server = self._lanes[lane]
        return Started(server.start([command, str(prelude or ""), *rest], log, variables), log, server.wait)

    def finish(self, words: Sequence[Any], **options: Any) -> Ended:
        """Run a command to its end."""
        return self.start(words, **options).ended()

    def _fresh(
        self, command: str, rest: list[str], log: Path, prelude: Path | None, variables: Mapping[str, str]
    ) -> Started:
        words = [str(Path(sys.executable).with_name(command)), *rest]
        if prelude:
            words = [sys.executable, "-c", _FRESH, command, str(prelude), *_ENTRIES[command], *rest]
        with open(log, "wb") as file:
            process = subprocess.Popen(words, env=os.environ | dict(variables), stdout=file, stderr=file)
        return Started(process.pid, log, process.wait)
