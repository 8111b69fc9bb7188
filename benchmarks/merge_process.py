"""What the benchmarks of merging share: a command's time and memory, and the two sides' environments.

Nothing here imports torch or holds a model: the peak memory of a child counts from that of its parent.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TORCH = "2.13.0"
MERGEKIT = "0.1.5"
PACKAGES = {"ours": [str(ROOT / "packages/rlhf-merge")], "mergekit": [f"mergekit=={MERGEKIT}"]}
_SAMPLED_EVERY = 0.02
"""Seconds between two looks at a child's memory."""


class CommandFailed(Exception):
    """A measured command ended with an error; the message has the end of what it printed."""


def measure(command: list[str], log: Path) -> dict[str, float]:
    """Run a command and measure its process from start to end.

    Args:
        command: with its arguments.
        log: file for what it prints.

    Returns:
        `seconds`; `peak_rss_mb`, the most resident memory, mapped files included, of the process or one of
        its children (wait4's maximum, which is VmHWM); `peak_anonymous_mb`, the most memory without mapped
        files that was seen, of all of them together; megabytes of 10**6 bytes.

    Raises:
        CommandFailed: it did.
    """
    seen = [0]
    done = threading.Event()
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    with log.open("wb") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment | {"HF_HUB_OFFLINE": "1"}
        )
        sampler = threading.Thread(target=_sample, args=(process.pid, seen, done))
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        done.set()
        sampler.join()
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        text = log.read_text(errors="replace")[-2000:]
        raise CommandFailed(f"{' '.join(command)} ended with {process.returncode}: {text}")
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "seconds": seconds,
        "peak_rss_mb": usage.ru_maxrss * unit / 1e6,
        "peak_anonymous_mb": seen[0] * 1024 / 1e6,
    }


def read_through(path: Path) -> None:
    """Read a file, a megabyte at a time: it is in the page cache then, and not in this process."""
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _sample(pid: int, seen: list[int], done: threading.Event) -> None:
    while not done.wait(_SAMPLED_EVERY):
        seen[0] = max(seen[0], sum(_anonymous_kb(one) for one in _family(pid)))


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants; nothing once it has ended."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _anonymous_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def make_environment(folder: Path, side: str) -> Path:
    """Make a venv of a side with the CPU build of torch, by uv; its Python.

    Args:
        folder: to make.
        side: a key of `PACKAGES`.

    Raises:
        CommandFailed: uv did.
    """
    python = folder / "bin" / "python"
    links = os.environ.get("PIP_FIND_LINKS")
    torch = (
        ["--find-links", links, f"torch=={TORCH}+cpu"]
        if links
        else ["--torch-backend", "cpu", f"torch=={TORCH}"]
    )
    for command in (
        ["uv", "venv", "--quiet", "--python", sys.executable, str(folder)],
        ["uv", "pip", "install", "--quiet", "--python", str(python), *torch, *PACKAGES[side]],
    ):
        # Not in the repository, whose pyproject.toml would constrain mergekit's dependencies.
        done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)
        if done.returncode:
            raise CommandFailed(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return python


def run_json(command: list[str]) -> Any:
    """What a command prints as JSON.

    Raises:
        CommandFailed: it ended with an error.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout or "null")


def versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of a Python and of packages that it has."""
    code = (
        "import json, platform, sys; from importlib.metadata import version;"
        "print(json.dumps({'python': platform.python_version()} | {n: version(n) for n in sys.argv[1:]}))"
    )
    return run_json([str(python), "-c", code, *packages])


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "platform": sys.platform,
    }
