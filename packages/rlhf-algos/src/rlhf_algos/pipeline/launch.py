"""A stage as it runs: how its processes are launched, guarded, tried again and read."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_algos.pipeline import child
from rlhf_algos.pipeline.config import Stage
from rlhf_algos.pipeline.kinds import KINDS, SETTINGS
from rlhf_algos.pipeline.measured import metrics_of
from rlhf_algos.pipeline.results import ResultStore
from rlhf_data import RunFolder, UserError, atomic_write_json

_LOCK = "lock"
LOG = "log.txt"
"""Log of the output of a stage's processes."""
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
OnEvent = Callable[[str, str, str], Any]
"""Called with an event, the name of its stage, and details in words."""
Launch = Callable[[Stage, dict[str, Any], Path], int]
"""Runs the process of a stage with these settings in its folder; returns its exit code."""


@dataclass(frozen=True)
class Planned:
    """A stage before it runs.

    Attributes:
        stage: The stage.
        settings: Its settings with paths.
        address: Address of its result.
        upstream: Addresses of the results that it refers to, by reference.
        judged: For a gate that compares with `previous`, the evaluations that it compares with.
    """

    stage: Stage
    settings: dict[str, Any]
    address: str
    upstream: dict[str, str]
    judged: dict[str, Any] | None = None


def execute(
    planned: Planned, store: ResultStore, launch: Launch, on_event: OnEvent, entry: dict[str, Any]
) -> dict[str, Any]:
    """Run a stage's process, with retries, and return its result.

    Args:
        planned: The stage.
        store: The folder of the pipeline.
        launch: Runs the process.
        on_event: Called with each event.
        entry: The stage's entry in the manifest; a failure is added.
    """
    stage = planned.stage
    folder = store.folder(stage.kind, planned.address)
    wait_for_the_last(folder, lambda: on_event("waiting", stage.name, "its process still ends"))
    if (aside := store.set_aside(folder, planned.address)) is not None:
        on_event("changed", stage.name, f"runs again; kept as {aside}")
    store.log("started", stage.name, address=planned.address)  # first, or the folder would be set aside
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder.open(folder)
    atomic_write_json(folder / SETTINGS, planned.settings)
    began = time.monotonic()
    on_event("started", stage.name, str(folder))
    for attempt in range(stage.retries + 1):
        finished = (done := KINDS[stage.kind].done) and (folder / done).exists()
        code = 0 if finished else launch(stage, planned.settings, folder)
        if code == 0:
            break
        store.log("failed", stage.name, address=planned.address, exit_code=code)
        if attempt == stage.retries:
            entry |= {"status": "failed", "exit_code": code}
            raise UserError(
                f"stage {stage.name} failed with exit code {code}: {last_line(folder / 'log.txt')} "
                f"(its log is {folder / 'log.txt'}); correct that and give the same command again",
                code="stage_failed",
                stage=stage.name,
                exit_code=code,
            )
    result = store.finish(stage.kind, planned.address, metrics_of(folder))
    seconds = round(time.monotonic() - began, 2)
    store.log("finished", stage.name, address=planned.address, seconds=seconds, metrics=result["metrics"])
    on_event("finished", stage.name, f"{seconds:.1f} s")
    return result


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
    """Wait for the stage's process of a pipeline that was killed: it ends soon after the pipeline.

    Until then it may still write into the folder, whose content decides how the stage is continued. `held`
    is called if there is such a process.
    """
    if (folder / _LOCK).exists():
        os.close(child.take_lock(str(folder / _LOCK), held))


def launcher(launch: int | str | None) -> list[str]:
    """The command before `-m MODULE`: Python, torchrun with `launch` processes, or the launcher named."""
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
