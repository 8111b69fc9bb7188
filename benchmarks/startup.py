"""How long `rlhf-train --help` and `rlhf-train minmax --help` take, process start included.

Each is started a few times after one run that fills the file cache. Prints medians and all runs in seconds as
JSON, with the goal of half a second.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from rlhf_data import atomic_write_json

COMMANDS = (("rlhf-train", "--help"), ("rlhf-train", "minmax", "--help"), ("rlhf-train", "dpo", "--help"))
GOAL_SECONDS = 0.5


def seconds_of(command: tuple[str, ...]) -> float:
    """Wall time of one run of an installed command.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    program = Path(sysconfig.get_path("scripts")) / command[0]
    started = time.perf_counter()
    subprocess.run([program, *command[1:]], check=True, capture_output=True)
    return time.perf_counter() - started


def measure(repeats: int) -> dict[str, Any]:
    """All commands; see benchmarks/README.md for the result's keys."""
    results = {}
    for command in COMMANDS:
        seconds_of(command)
        runs = [seconds_of(command) for _ in range(repeats)]
        results[" ".join(command)] = {"median_seconds": statistics.median(runs), "seconds": runs}
    return {
        "benchmark": "startup",
        "goal_seconds": GOAL_SECONDS,
        "reached": all(result["median_seconds"] <= GOAL_SECONDS for result in results.values()),
        "repeats": repeats,
        "versions": {"python": platform.python_version(), "platform": sys.platform},
        "commands": results,
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each command (default 9)")
    parser.add_argument("--output", type=Path, help="write the JSON to this file too")
    options = parser.parse_args(arguments)
    result = measure(options.repeats)
    if options.output:
        atomic_write_json(options.output, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
