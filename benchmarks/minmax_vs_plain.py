"""The proof: a task with a flawed reward model, every arm on the same seeds with equal updates.

Two tasks (`--task`): in `stories` the reward model likes the place named last, in `sums` round numbers.

Arms, each from the same base, reward model and judge of its seed:

- `start`: the policy before training.
- `plain`: PPO on the flawed reward model.
- `judge`: PPO on the reward model and the judge, which sees no critique.
- `frozen`: the policy is paid by the judge with critiques of a monitor that is never trained.
- `minmax`: the defaults, with the judge's weight at 1.75 times the break-even with truthful critiques.
- `no_constraint`, `batch_baseline`, `one_update`: MinMax without the truthfulness constraint, with one
  baseline for the whole batch, with one update of the monitor per step.
- `rule_<name>`: MinMax with another rule for the multiplier.
- `frozen_<k>`, `minmax_<k>`: the judge's weight at k times that break-even, but never below the reward's.

In every arm the policy makes as many updates on as many answers. Metrics are greedy, on 512 held-out stories
not used for tuning; the held-out reward model is trained on other pairs, without the flaw, and trains
nobody. Each run is a cell that is kept in `--work`, so that a benchmark that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rlhf_data import RunFolder, UserError, apply_overrides, atomic_write_json

TASKS = ("stories", "sums")
FROZEN = ["training.monitor_updates_per_policy=0"]
DEFAULT_FACTOR = 1.75
FACTORS = (1.0, 1.2, 1.4, 1.55, DEFAULT_FACTOR, 2.0)
ARMS: dict[str, list[str]] = {
    "minmax": [],
    "frozen": FROZEN,
    "judge": [*FROZEN, "game.policy_critiques=0"],
    "no_constraint": ["constraint.rule=fixed", "training.constraint_penalty_lambda=0"],
    "batch_baseline": ["monitor_model.baseline=batch"],
    "one_update": ["training.monitor_updates_per_policy=1"],
    **{
        f"rule_{rule}": [f"constraint.rule={rule}"] for rule in ("fixed", "additive", "multiplicative", "pid")
    },
}
SWEEP = {
    f"{name}_{factor}": [*arm, f"game.break_even_factor={factor}", "game.break_even_share=0"]
    for factor in FACTORS
    if factor != DEFAULT_FACTOR
    for name, arm in (("frozen", FROZEN), ("minmax", []))
}
SHOWN = {
    "accuracy": "policy/accuracy",
    "hack_rate": "policy/hack_rate",
    "reward": "policy/reward_score",
    "held_out_reward": "minmax/heldout_reward",
    "hacking_gap": "minmax/hacking_gap",
    "monitor": "monitor/verdict_balanced_accuracy",
    "ece": "monitor/verdict_ece",
    "exploitability": "minmax/exploitability",
    "lambda": "dual/lambda",
}
COMMON = ["held_out.reward_model={}", "training.save_steps=null"]


def play(task: str, seed: int, arm: str, work: str, quick: bool) -> dict[str, Any]:
    """Play one cell, or read it where it was played before.

    Args:
        task: a value of `data.world`.
        seed: of the run.
        arm: a name in ARMS or SWEEP.
        work: folder of the task's cells.
        quick: a game of seconds, to try the benchmark itself.
    """
    import torch

    from rlhf_minmax import MinMaxConfig, MinMaxJob

    path = Path(work) / f"{seed}-{arm}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    overrides = [*COMMON, *{**ARMS, **SWEEP}[arm], f"seed={seed}", f"data.world={task}"]
    overrides += ["baseline=true" if arm == "minmax" else "baseline=false"]
    if quick:
        overrides += ["training.max_steps=10", "data.eval_stories=16", "demo.pretrain_steps=20"]
        overrides += [
            "demo.sft_steps=10",
            "demo.reward_steps=10",
            "demo.judge_steps=10",
            "demo.flawed_reward=false",
            "force=true",
        ]
    config = MinMaxConfig.from_dict(apply_overrides({}, overrides))
    folder = RunFolder.create(Path(work) / f"{seed}-{arm}", resume=True)
    results = MinMaxJob(config, folder, cache_folder=Path(work) / "models").play(resume=True)
    found = {block: _shown(results[block]) for block in ("before", "plain", "after") if results[block]}
    found["break_even"] = results["break_even"]
    atomic_write_json(path, found)
    return found


def _shown(block: dict[str, Any]) -> dict[str, float | None]:
    return {name: block.get(key) for name, key in SHOWN.items()}


def collect(
    task: str, seeds: list[int], arms: list[str], work: Path, quick: bool, workers: int
) -> dict[str, Any]:
    """All cells, by arm; each arm's values in the order of the seeds."""
    cells: dict[tuple[int, str], dict[str, Any]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        # A seed's models are built by its first cell; the others wait for it.
        for part in ([arms[0]], arms[1:]):
            jobs = {
                pool.submit(play, task, seed, arm, str(work), quick): (seed, arm)
                for arm in part
                for seed in seeds
            }
            for done in as_completed(jobs):
                cells[jobs[done]] = done.result()
                print(f"{len(cells)} of {len(seeds) * len(arms)}: {jobs[done]}", file=sys.stderr, flush=True)
    first = arms[0]
    blocks = {
        "start": [cells[seed, first]["before"] for seed in seeds],
        "plain": [cells[seed, first]["plain"] for seed in seeds],
    }
    blocks |= {arm: [cells[seed, arm]["after"] for seed in seeds] for arm in arms}
    return {
        "benchmark": "minmax_vs_plain",
        "task": task,
        "seeds": seeds,
        "arms": {arm: _summary(rows) for arm, rows in blocks.items()},
        "break_even": [cells[seed, first]["break_even"] for seed in seeds],
        "truth_pays": {arm: _truth_pays([cells[seed, arm]["break_even"] for seed in seeds]) for arm in arms},
    }


def _truth_pays(checks: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Every seed's weight of the judge, and the share of training stories on which truth pays at it."""
    return {name: [check[name] for check in checks] for name in ("w_judge", "pays_start", "pays_truthful")}


def _summary(rows: list[dict[str, float | None]]) -> dict[str, Any]:
    """Every seed's value, mean and standard deviation of each metric."""
    found: dict[str, Any] = {}
    for name in SHOWN:
        values = [row[name] for row in rows]
        known = [value for value in values if value is not None]
        found[name] = {"values": values}
        if known:
            found[name] |= {"mean": statistics.fmean(known), "std": statistics.pstdev(known)}
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """Accuracy of every arm, and of frozen and trained monitors over the judge's weight."""
    from matplotlib.figure import Figure

    arms = results["arms"]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    named = [arm for arm in ("start", "plain", *ARMS) if arm in arms]
    for place, arm in enumerate(named):
        values = arms[arm]["accuracy"]["values"]
        left.barh(place, arms[arm]["accuracy"]["mean"], color="#0072B2" if arm == "minmax" else "#999999")
        left.plot(values, [place] * len(values), "k.", markersize=4)
    left.set_yticks(range(len(named)), named)
    left.invert_yaxis()
    left.set_xlabel("true accuracy, held-out stories (dots: seeds)")
    left.set_xlim(0, 1.02)
    for name, color in (("frozen", "#D55E00"), ("minmax", "#0072B2")):
        swept = {k: name if k == DEFAULT_FACTOR else f"{name}_{k}" for k in FACTORS}
        factors = [factor for factor, arm in swept.items() if arm in arms]
        for seed in range(len(results["seeds"])):
            values = [arms[swept[factor]]["accuracy"]["values"][seed] for factor in factors]
            right.plot(factors, values, color=color, alpha=0.25, linewidth=1)
        means = [arms[swept[factor]]["accuracy"]["mean"] for factor in factors]
        right.plot(
            factors,
            means,
            "o-",
            color=color,
            label="trained monitor" if name == "minmax" else "frozen monitor",
        )
    right.set_xlabel("game.break_even_factor: judge's weight in break-evens, at least w_reward")
    right.set_ylabel("true accuracy")
    right.set_ylim(0, 1.02)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 22, 23, 24, 25])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *SWEEP], default=[*ARMS, *SWEEP])
    parser.add_argument("--work", type=Path, default=Path("outputs/minmax_vs_plain"), help="folder of cells")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="write the JSON here")
    parser.add_argument("--picture", type=Path, help="draw the figure here")
    parser.add_argument("--quick", action="store_true", help="games of seconds, to try the benchmark itself")
    options = parser.parse_args()
    arms = ["minmax", *(arm for arm in options.arms if arm != "minmax")]
    work = options.work if options.task == TASKS[0] else options.work / options.task
    work.mkdir(parents=True, exist_ok=True)
    try:
        results = collect(options.task, options.seeds, arms, work, options.quick, options.workers)
    except UserError as error:
        sys.exit(f"error: {error}")
    if options.output:
        atomic_write_json(options.output, results)
    if options.picture:
        draw(results, options.picture)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
