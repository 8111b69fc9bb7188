"""A command in forks of a process that has the imports done already."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_SERVER = """
import json, os, sys
{setup}
for line in sys.stdin:
    arguments, log, environment = json.loads(line)
    child = os.fork()
    if not child:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        main(arguments, prog_name="{name}")
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class CommandServer:
    """Runs a command as often as asked, one process at a time."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def start(self, arguments: Sequence[Any], log: Path, environment: Mapping[str, str] | None = None) -> int:
        """Start the command, whose output is appended to a file; the process."""
        assert self._server.stdin is not None
        order = [[str(word) for word in arguments], str(log), dict(environment or {})]
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        """Wait for the end of what was started; its exit code."""
        return self._answer()

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


@contextlib.contextmanager
def command_server(name: str, setup: str) -> Iterator[CommandServer]:
    """A server of a command.

    Args:
        name: of the command.
        setup: Python code that imports its `main`.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER.format(setup=setup, name=name)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield CommandServer(server)
