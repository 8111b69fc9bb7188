"""`rlhf-train doctor`: whether this machine can train, and what is missing where it cannot."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rlhf_data import cache_folder

Status = Literal["ok", "note", "problem"]

_FREE_DISK, _FREE_MEMORY = 5e9, 2e9
"""Bytes below which a run of the tiny models may still end early."""
_OPEN_FILES = 1024
_OPTIONAL = {
    "trl": ("--backend trl", "rlhf-train[trl]"),
    "deepspeed": ("ZeRO (training.deepspeed, --set deepspeed=FILE)", "rlhf-algos[deepspeed]"),
    "bitsandbytes": ("quantised weights and 8-bit optimizers", "bitsandbytes"),
    "ray": ("workers on a cluster (--distributed)", "rlhf-algos[ray]"),
    "vllm": ("sampling with vLLM", "rlhf-infer[vllm]"),
    "tensorboard": ("report_to=tensorboard", "rlhf-algos[tensorboard]"),
    "wandb": ("report_to=wandb", "rlhf-algos[wandb]"),
    "lm_eval": ("tasks of lm-eval", "rlhf-report[harness]"),
}
"""Packages that some settings need: for what, and what installs them."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        name: what was looked at.
        status: `ok`; `note`, where something optional is missing; `problem`, where runs would fail.
        found: what is there.
        advice: what to do about it; empty where nothing needs doing.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def examine(port: int | None = None) -> list[Finding]:
    """Look at everything that a run needs, and at a port a server needs.

    A check that fails unexpectedly is itself reported as a problem.
    """
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "Python": _python,
        "packages": _requirements,
        "optional packages": _optional,
        "torch": _torch,
        "memory": _memory,
        "folders": _folders,
        "open files": _open_files,
    }
    if port is not None:
        checks["port"] = lambda: _port(port)
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:  # a machine may be broken in any way, and the other checks still count
            found.append(Finding(name, "problem", f"{type(error).__name__}: {error}", "see the message"))
    return found


def run_doctor(*, port: int | None, as_json: bool) -> bool:
    """Print the findings; whether none is a problem."""
    found = examine(port)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        _show(found)
    return not any(finding.status == "problem" for finding in found)


def _show(found: list[Finding]) -> None:
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    from rlhf_train.display.console import make_console

    columns = (Column(name, overflow="fold") for name in ("check", "", "found", "what to do"))
    table = Table(*columns, box=box.SIMPLE)
    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    for finding in found:
        status = Text(finding.status, style=colours[finding.status])
        table.add_row(Text(finding.name), status, Text(finding.found), Text(finding.advice))
    console = make_console()
    console.print(table)
    problems = sum(finding.status == "problem" for finding in found)
    notes = sum(finding.status == "note" for finding in found)
    console.print(f"{problems} problems, {notes} notes; rlhf-train minmax needs no network and no GPU")


def _python() -> Iterator[Finding]:
    needed = importlib.metadata.metadata("rlhf-train")["Requires-Python"]
    yield Finding("Python", "ok", f"{platform.python_version()} ({needed}), {platform.platform()}")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("processors", "ok", f"{usable} of {os.cpu_count()} usable")


def _requirements() -> Iterator[Finding]:
    """Every requirement of the installed packages of this workspace, without extras."""
    from packaging.requirements import Requirement

    own = sorted(
        {
            name
            for each in importlib.metadata.distributions()
            if (name := (each.metadata["Name"] or "").lower()).startswith("rlhf-")
        }
    )
    wrong = []
    for name in own:
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                wrong.append(f"{requirement.name} is missing ({name} needs it)")
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} ({name} needs {requirement.specifier})")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in own)
    yield Finding("packages", "ok", versions)
    if wrong:
        yield Finding("requirements", "problem", "; ".join(wrong), "install them anew: uv sync")


def _optional() -> Iterator[Finding]:
    for module, (use, wanted) in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(module, "note", "not installed", f"only for {use}: pip install '{wanted}'")


def _torch() -> Iterator[Finding]:
    import torch

    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    for device in devices:
        one = torch.ones(64, 64, device=device, requires_grad=True)
        (one @ one).sum().backward()
        grad = one.grad
        right = grad is not None and bool((grad == 128).all())
        shown = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
        if device.type == "cuda":
            facts = torch.cuda.get_device_properties(device)
            free, total = torch.cuda.mem_get_info(device)
            shown = f"{facts.name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
            shown += ", bf16" if torch.cuda.is_bf16_supported() else ", no bf16: training is in fp32 or fp16"
        name = f"GPU {device.index}" if device.type == "cuda" else "torch"
        if right:
            yield Finding(name, "ok", shown)
        else:
            yield Finding(
                name, "problem", f"{shown}; a matmul of ones gives a wrong gradient", "reinstall torch"
            )
    if len(devices) == 1:
        built = torch.version.cuda
        advice = f"where there is one: torch is built for CUDA {built}, see nvidia-smi" if built else ""
        yield Finding("GPU", "note", "none found; training is on the CPU", advice)


def _memory() -> Iterator[Finding]:
    import psutil

    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (bound := limit.read_text().strip()).isdigit():
        free = min(free, int(bound) - int(used.read_text()))  # a container's own limit
    small = free < _FREE_MEMORY
    advice = "close other programs, or lower max_tokens_per_batch" if small else ""
    yield Finding("memory", "problem" if small else "ok", f"{free / 1e9:.1f} GB available", advice)


def _folders() -> Iterator[Finding]:
    """Where runs and built models are written: enough room, and files that can be locked and renamed."""
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    for name, folder in (
        ("working directory", Path.cwd()),
        ("cache of built models", cache_folder("demo")),
        ("cache of the hub", hub),
        ("temporary files", Path(tempfile.gettempdir())),
    ):
        yield _folder(name, folder)
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < 64e6:
        yield Finding("/dev/shm", "problem", "less than 64 MB free", "give the container --shm-size=1g")


def _folder(name: str, folder: Path) -> Finding:
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not place.is_dir():
        return Finding(name, "problem", f"{folder}: {place} is not a folder", "choose another folder")
    free = shutil.disk_usage(place).free
    shown = f"{folder}, {free / 1e9:.1f} GB free"
    try:
        with tempfile.TemporaryDirectory(prefix=".rlhf-doctor-", dir=place) as made:
            path = Path(made) / "a"
            with path.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write("x")
                file.flush()
                os.fsync(file.fileno())
            path.replace(Path(made) / "b")
    except OSError as error:
        return Finding(name, "problem", f"{shown}; {error}", "make it writable, or choose another folder")
    if free < _FREE_DISK:
        return Finding(name, "problem", shown, f"free {_FREE_DISK / 1e9:.0f} GB: checkpoints need room")
    return Finding(name, "ok", shown)


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        yield Finding("open files", "problem", f"{soft} (at most {hard})", f"ulimit -n {_OPEN_FILES}")
    else:
        yield Finding("open files", "ok", str(soft))


def _port(port: int) -> Iterator[Finding]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As rlhf-serve binds it: a port in TIME_WAIT, whose last server has just ended, can be listened on.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            yield Finding(f"port {port}", "problem", reason, "choose another with rlhf-serve --port")
            return
    yield Finding(f"port {port}", "ok", "free")
