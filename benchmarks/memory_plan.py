"""The memory that `--dry-run` plans beside what processes take, for ten jobs of four shapes.

    python benchmarks/memory_plan.py [--output memory_plan.json]

Jobs run as in `sharded_memory.py`: two steps of random Llamas on the CPU, memory counted above what the same
job takes on a model of 1% of the size.  Prints JSON: the plan for the phase that needs most, the largest peak
of all processes, and plan over peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from sharded_memory import make_model, measure, write_rows

SHAPES: dict[str, dict[str, Any]] = {
    "deep": {"millions": 100, "hidden": 640},
    "wide": {"millions": 100, "hidden": 640, "vocabulary": 64_000},
    "tied": {"millions": 70, "hidden": 640, "vocabulary": 64_000, "tied": True},
    "long": {"millions": 40, "hidden": 512, "words": 80},
}
"""Sizes of the models, and words of a text; 12 unless said."""
JOBS = [
    ("deep", "sft", "one", 1),
    ("deep", "dpo", "fsdp", 2),
    ("deep", "dpo", "zero3", 2),
    ("deep", "grpo", "fsdp", 2),
    ("wide", "dpo", "one", 1),
    ("wide", "sft", "fsdp", 2),
    ("tied", "sft", "fsdp", 2),
    ("tied", "dpo", "fsdp", 2),
    ("long", "sft", "one", 1),
    ("long", "ppo", "one", 1),
]
"""Shape, method, what shards, processes."""


def main() -> None:
    """Make the models, run every job, print plan and measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where the JSON goes; printed if left out")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for shape, given in SHAPES.items():
            folder, sizes = Path(name) / shape, dict(given)
            folder.mkdir()
            write_rows(folder, sizes.pop("words", 12))
            make_model(folder / "model", **sizes)
            make_model(folder / "small", 1, hidden=96)
        for shape, job, mode, processes in JOBS:
            found = measure(job, mode, processes, Path(name) / shape)
            what = {"shape": shape, "job": job, "mode": mode, "processes": processes}
            planned, measured = found["planned_peak"], found["stepped"]
            rows.append(what | {"planned": planned, "measured": measured})
            rows[-1]["ratio"] = round(planned / measured, 3)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = json.dumps({"shapes": SHAPES, "rows": rows}, indent=1) + "\n"
    if options.output:
        options.output.write_text(report)
    else:
        print(report)


if __name__ == "__main__":
    main()
