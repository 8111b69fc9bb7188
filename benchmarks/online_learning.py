"""GRPO and PPO on the embedded tasks: the reward at the start and at the end, for several seeds.

Runs `rlhf-train` without settings of its own, one run after the other.  Prints JSON and draws the learning
curves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlhf_data import atomic_write_json

METHODS, TASKS = ("grpo", "ppo"), ("story", "arithmetic")
_COLOURS = {"story": "#1b6ca8", "arithmetic": "#c8553d"}
_SMOOTHED = 8
"""Steps that a point of a curve is the mean of."""


def train(method: str, task: str, seed: int, folder: Path, more: list[str]) -> dict[str, Any]:
    """One run of the command; its held-out rewards, its seconds and the rewards of its steps."""
    command = [Path(sys.executable).with_name("rlhf-train"), method, "--seed", seed, "--output-dir", folder]
    started = time.perf_counter()
    done = subprocess.run(
        [*map(str, command), "--set", f"task={task}", *more],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{method} on {task}, seed {seed}: {done.stderr}")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "method": method,
        "task": task,
        "seed": seed,
        "start": results["before"]["eval_reward"],
        "end": results["after"]["eval_reward"],
        "steps": results["steps"],
        "training_seconds": results["wall_time"]["training"],
        "seconds": time.perf_counter() - started,
        "rewards": [round(row["reward"], 4) for row in rows],
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """A panel for each method: smoothed rewards of every run over its steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(METHODS), figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, method in zip(axes, METHODS, strict=True):
        for run in (run for run in runs if run["method"] == method):
            rewards = run["rewards"]
            means = [
                statistics.fmean(rewards[max(0, i - _SMOOTHED + 1) : i + 1]) for i in range(len(rewards))
            ]
            first = all(run["seed"] <= other["seed"] for other in runs)
            label = run["task"] if first else None
            axis.plot(range(1, len(means) + 1), means, color=_COLOURS[run["task"]], lw=1.4, label=label)
        axis.axhline(0.9, color="0.6", lw=0.8, ls="--")
        axis.set(title=method.upper(), xlabel="step", ylim=(0.35, 1.02))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"reward (mean of {_SMOOTHED} steps)")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run everything and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    parser.add_argument("--output", type=Path, help="write the results to this file too")
    parser.add_argument("--figure", type=Path, help="draw the curves into this file")
    parser.add_argument("--quick", action="store_true", help="two steps each, to see that it runs")
    options = parser.parse_args()
    more = (
        ["--max-steps", "2", "--set", "story_rows=64", "--set", "story_eval_rows=8"] if options.quick else []
    )
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for task in TASKS:
                for method in METHODS:
                    runs.append(train(method, task, seed, Path(folder) / f"{method}-{task}-{seed}", more))
                    shown = {key: value for key, value in runs[-1].items() if key != "rewards"}
                    print(json.dumps(shown), file=sys.stderr, flush=True)
    results = {"runs": runs}
    if options.output:
        atomic_write_json(options.output, results)
    if options.figure:
        draw(runs, options.figure)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
