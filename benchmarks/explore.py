"""`rlhf-report explore` or `prepare` on many pairs: time and memory, of this checkout or of two in turn.

    uv run benchmarks/explore.py --pairs 160000
    uv run benchmarks/explore.py --pairs 160000 --command prepare
    git worktree add ../before COMMIT
    uv run benchmarks/explore.py --before ../before --rounds 3

The pairs are rows of HH-RLHF, again and again, each time with a tenth of their words replaced by other words
of the rows, so that they stay as long and are no duplicates. Memory is that of all processes together (their
proportional set sizes, every quarter of a second). Of two checkouts, who begins changes; `differences` counts
the numbers of exploration.json (of `prepare`, report.json) that are not the same to the last digit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
HH_DATA = HERE.parent / "shared/data/hh-rlhf/harmless-base-1500.jsonl.gz"
_REPLACED = 0.1
_COMMANDS = {"explore": ("--output-dir", "exploration.json"), "prepare": ("--out", "report.json")}
"""The option for the folder of each command, and the file with its numbers."""


def write_pairs(path: Path, count: int) -> None:
    """Write varied rows of HH-RLHF."""
    with gzip.open(HH_DATA, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    words = [word for row in rows for word in row["chosen"].split(" ") if word.isalpha()]
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            row = rows[number % len(rows)]
            if number >= len(rows):
                row = _varied(row, words, rng)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _varied(row: dict[str, str], words: list[str], rng: random.Random) -> dict[str, str]:
    """The row with other words; what both dialogues begin with stays what both begin with."""
    both = zip(row["chosen"].split(" "), row["rejected"].split(" "), strict=False)
    shared = "".join(f"{word} " for word, _ in takewhile(lambda words: words[0] == words[1], both))

    def vary(text: str) -> str:
        return " ".join(
            rng.choice(words) if word.isalpha() and rng.random() < _REPLACED else word
            for word in text.split(" ")
        )

    start = vary(shared)
    return {side: start + vary(row[side][len(shared) :]) for side in ("chosen", "rejected")}


def measure(name: str, checkout: Path, data: Path, folder: Path) -> dict[str, Any]:
    """Explore or prepare the pairs with the sources of a checkout; what it took, and what it found."""
    sources = [str(each) for part in ("packages", "apps") for each in checkout.glob(f"{part}/*/src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources)}
    output, result = _COMMANDS[name]
    command = [sys.executable, "-m", "rlhf_report", name, str(data), output, str(folder)]
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    memory = 0
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        memory = max(memory, sum(_set_size(each) for each in _tree(process.pid)))
        time.sleep(0.25)
    seconds = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{checkout} failed")
    found = json.loads((folder / result).read_text(encoding="utf-8"))
    return {
        "seconds": seconds,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "megabytes": memory / 1e6,
        "found": found,
    }


def _tree(process: int) -> list[int]:
    """A process and those that it started, as far as they still run."""
    found = [process]
    for each in found:
        try:
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
        except OSError:
            continue
    return found


def _set_size(process: int) -> int:
    """Bytes of a process, what it shares divided by those that share it; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def differences(first: Any, second: Any, at: str = "") -> Iterator[str]:
    """Names of the values that are not the same, among those that both have."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in first.keys() & second.keys():
            yield from differences(first[key], second[key], f"{at}/{key}")
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from differences(a, b, f"{at}/{number}")
    elif first != second:
        yield at


def main() -> int:
    """Write the pairs, run the command on them, print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=160_000)
    parser.add_argument("--command", choices=_COMMANDS, default="explore")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", type=Path, help="another checkout of this repository")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    places = {"now": HERE} | ({"before": options.before.resolve()} if options.before else {})
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in places}
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "pairs.jsonl")
        write_pairs(data, options.pairs)
        result: dict[str, Any] = {
            "command": options.command,
            "pairs": options.pairs,
            "megabytes_of_file": data.stat().st_size / 1e6,
            "cores": os.cpu_count(),
        }
        for turn in range(options.rounds):
            for side in sorted(places, reverse=bool(turn % 2)):
                folder = Path(name, f"{side}-{turn}")
                measured[side].append(measure(options.command, places[side], data, folder))
    for side, rounds in measured.items():
        names = [key for key in rounds[0] if key != "found"]
        result[side] = {key: round(statistics.median(each[key] for each in rounds), 1) for key in names}
    if options.before:
        both = zip(measured["before"], measured["now"], strict=True)
        ratios = [{key: a[key] / b[key] for key in ("seconds", "processor_seconds")} for a, b in both]
        result["before / now"] = {
            key: round(statistics.median(each[key] for each in ratios), 2) for key in ratios[0]
        }
        result["differences"] = list(differences(*(measured[side][0]["found"] for side in measured)))
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
