"""The memory that `--dry-run` plans beside what processes take, for 15 jobs of seven shapes.

    python benchmarks/memory_plan.py [--shapes deep long] [--output memory_plan.json]

Jobs run as in `sharded_memory.py`: two steps of random Llamas on the CPU, memory counted above what the same
job takes on a model of 1% of the size; games have a reward model and a judge of the players' size.  Prints
JSON: the plan for the phase that needs most, the largest peak of all processes, and plan over peak.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from sharded_memory import make_model, make_scorers, measure, write_rows

SHAPES: dict[str, dict[str, Any]] = {
    "deep": {"millions": 100, "hidden": 640},
    "wide": {"millions": 100, "hidden": 640, "vocabulary": 64_000},
    "tied": {"millions": 70, "hidden": 640, "vocabulary": 64_000, "tied": True},
    "long": {"millions": 40, "hidden": 512, "words": 80},
    "game": {"millions": 63, "hidden": 512},
    "wide game": {"millions": 40, "hidden": 384, "vocabulary": 32_000},
    "long game": {"millions": 25, "hidden": 384, "words": 60},
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
    ("game", "minmax", "one", 1),
    ("game", "minmax", "fsdp", 2),
    ("wide game", "minmax", "one", 1),
    ("wide game", "minmax_full", "one", 1),
    ("long game", "minmax", "one", 1),
]
"""Shape, method, what shards, processes."""


def write_shape(folder: Path, sizes: dict[str, Any]) -> None:
    """Write the rows and models of a shape; of a game's, scorers too."""
    folder.mkdir()
    write_rows(folder, sizes.get("words", 12))
    make_model(folder / "model", **{key: value for key, value in sizes.items() if key != "words"})
    make_model(folder / "small", 1, hidden=96)
    if folder.name.endswith("game"):
        make_scorers(folder / "model")
        make_scorers(folder / "small")


def main() -> None:
    """Make the models, run every job, print plan and measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--output", type=Path, help="where the JSON goes; printed if left out")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    shapes = {shape: SHAPES[shape] for shape in options.shapes}
    with tempfile.TemporaryDirectory() as name:
        # In a process of its own, so that the models leave memory before anything is measured.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            for shape, sizes in shapes.items():
                pool.submit(write_shape, Path(name) / shape, sizes).result()
        for shape, job, mode, processes in [each for each in JOBS if each[0] in shapes]:
            found = measure(job, mode, processes, Path(name) / shape)
            what = {"shape": shape, "job": job, "mode": mode, "processes": processes}
            planned, measured = found["planned_peak"], found["stepped"]
            rows.append(what | {"planned": planned, "measured": measured})
            rows[-1]["ratio"] = round(planned / measured, 3)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = json.dumps({"shapes": shapes, "rows": rows}, indent=1) + "\n"
    if options.output:
        options.output.write_text(report)
    else:
        print(report)


if __name__ == "__main__":
    main()
