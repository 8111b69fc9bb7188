"""The processes of a stage: how they are launched, guarded and read."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_algos.pipeline import child
from rlhf_algos.pipeline.config import Stage
from rlhf_algos.pipeline.kinds import KINDS
from rlhf_data import UserError

_LOCK = "lock"
LOG = "log.txt"
"""What a stage's processes printed."""
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}


def launch(stage: Stage, settings: dict[str, Any], folder: Path) -> int:
    """Run a stage's command in its folder; its exit code. Whatever ends this process ends the command too.

    Raises:
        UserError: the package of the command is not installed.
    """
    module, arguments = KINDS[stage.kind].command(folder, settings)
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        name = package.replace("_", "-")
        raise UserError(
            f"stage {stage.name} runs {name}, which is not installed; pip install {name}",
            code="missing_package",
            package=name,
        )
    guard = [sys.executable, child.__file__, str(folder / _LOCK), str(folder / LOG)]
    process = subprocess.Popen(
        [*guard, *launcher(stage.launch), module, *arguments],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | _ENVIRONMENT,
    )
    assert process.stdin is not None
    try:
        return process.wait()
    finally:
        process.stdin.close()  # if the stage still runs the guard ends it; it may write a checkpoint first
        process.wait()


def wait_for_the_last(folder: Path, held: Callable[[], None]) -> None:
    """Wait for the stage's process of a pipeline that was killed, which ends with it, but not at once.

    Until then it may still write into the folder, from which it is decided how the stage goes on. `held` is
    called if there is such a process.
    """
    if (folder / _LOCK).exists():
        os.close(child.take_lock(str(folder / _LOCK), held))


def launcher(launch: int | str | None) -> list[str]:
    """The words before a module: of Python, of torchrun with so many processes, or of another launcher."""
    if launch is None:
        return [sys.executable, "-m"]
    if isinstance(launch, int):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc-per-node={launch}", "-m"]
    return [*shlex.split(launch), "-m"]


def last_line(log: Path) -> str:
    """The last line of a log, the sentence of an error where there is one."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "it wrote nothing"
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return errors[-1] if errors else next((line for line in reversed(lines) if line), "it wrote nothing")
