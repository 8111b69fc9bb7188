"""Does moving λ help where nobody knows which λ is right?

    uv run python benchmarks/minmax_proof/duals.py --output benchmarks/results/minmax_duals.json \
        --figure docs/images/duals.png

Everything is chosen on stories and then played on sums, on other seeds:

1. On stories each rule of dual ascent starts at λ = .1 with several step sizes, and λ is also left at each
   of four values.  The step size, and the fixed λ, with the highest mean accuracy are chosen; the smaller
   one of two that are equal.
2. On sums each rule plays with its step from λ = .1, 1, 5 and 20, and λ is left at each of these.  A seed of
   which a run fails, such as one whose judge misses its gate, is left out, and named in `errors`.

`--tuned FILE` takes what an earlier output chose on stories, and says at which commit that was.

The judge's weight is 1.4 times the break-even (or 1), where a monitor that learns was found to matter; all
other settings are the defaults.  Prints JSON: every seed's values and means with 95% intervals, each rule's
accuracy over all starts, and its difference to the λ that was chosen on stories and to the best fixed one,
which nobody could know beforehand.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from cells import difference, name_of, play_cells, provenance, publish, seeds_parser, summary
from default_run import run

from rlhf_data import RunFolder

RULES = {
    "multiplicative": (0.05, 0.1, 0.25, 0.5),
    "additive": (0.5, 2.0, 8.0, 32.0),
    "log": (0.5, 2.0, 8.0, 32.0),
    "pid": (0.1, 0.5, 2.0, 8.0),
}
"""Step sizes that are tried."""
STARTS = (0.1, 1.0, 5.0, 20.0)
FIXED = "fixed"
_NUMBERS = (
    "accuracy",
    "hack_rate",
    "monitor",
    "violation",
    "lambda",
    "late_violation",
    "lambda_range",
    "seconds",
)


def play(task: str, seed: int, rule: str, step_size: float, start: float, work: Path) -> dict[str, Any]:
    """One run; see `cells.play_cells`."""
    settings = [
        f"data.world={task}",
        f"constraint.rule={rule}",
        f"constraint.step_size={step_size}",
        f"training.constraint_penalty_lambda={start}",
        "game.break_even_factor=1.4",
    ]
    folder = work / f"run-{name_of([task, seed, rule, step_size, start])}"
    options = ["--seed", str(seed), "--no-baseline", *(f"--set={setting}" for setting in settings)]
    found = run(options, folder, work)
    if "error" in found:
        return found
    steps = list(RunFolder(folder).read_metrics())
    late = steps[len(steps) // 2 :]
    multipliers = [step["dual/lambda"] for step in late]
    found["late_violation"] = sum(step["constraint/violation"] for step in late) / len(late)
    return found | {"lambda_range": max(multipliers) - min(multipliers)}


def waves(cells: list[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    """The first cell of every task and seed, which builds the models of the others, and the rest."""
    first = {cell[:2]: cell for cell in reversed(cells)}
    return [list(first.values()), [cell for cell in cells if cell not in first.values()]]


def measure(cells: list[tuple[Any, ...]], options: Namespace) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What the runs of `cells` returned, in the cells' order."""
    order = waves(cells)
    runs = play_cells(play, order, options.work.resolve(), options.workers)
    found = dict(zip([cell for wave in order for cell in wave], runs, strict=True))
    return {cell: found[cell] for cell in cells}


def choose(options: Namespace) -> tuple[dict[str, float], float, dict[str, Any]]:
    """The step size of each rule and the fixed λ that did best on stories; and the table."""
    tried = [(rule, step, STARTS[0]) for rule, steps in RULES.items() for step in steps]
    tried += [(FIXED, 1.0, start) for start in STARTS]
    runs = measure([("stories", seed, *cell) for cell in tried for seed in options.tuning_seeds], options)
    table: dict[str, dict[float, Any]] = {}
    for rule, step, start in tried:
        rows = [runs["stories", seed, rule, step, start] for seed in options.tuning_seeds]
        values = {name: summary([row.get(name) for row in rows]) for name in _NUMBERS}
        table.setdefault(rule, {})[start if rule == FIXED else step] = values
    best = {
        rule: max(rows, key=lambda value: (rows[value]["accuracy"]["mean"], -value))
        for rule, rows in table.items()
    }
    return best, best.pop(FIXED), table


def report(options: Namespace) -> dict[str, Any]:
    """The whole experiment."""
    if options.tuned:
        earlier = json.loads(options.tuned.read_text(encoding="utf-8"))
        steps, fixed, tuning = (
            earlier[name] for name in ("step_sizes", "fixed_chosen_on_stories", "stories")
        )
        tuned = {"tuning_seeds": earlier["tuning_seeds"], "tuning_commit": earlier["commit"]}
    else:
        steps, fixed, tuning = choose(options)
        tuned = {"tuning_seeds": options.tuning_seeds}
    played = {rule: steps.get(rule, 1.0) for rule in (FIXED, *RULES)}
    cells = [
        ("sums", seed, rule, step, start)
        for rule, step in played.items()
        for start in STARTS
        for seed in options.seeds
    ]
    runs = measure(cells, options)
    failed = {cell[1] for cell, row in runs.items() if "error" in row}
    seeds = [seed for seed in options.seeds if seed not in failed]
    if not seeds:
        raise SystemExit(f"runs failed on every seed: {runs}")
    table: dict[str, dict[float, Any]] = {rule: {} for rule in played}
    accuracy: dict[tuple[str, float], list[float]] = {}
    for rule, step in played.items():
        for start in STARTS:
            rows = [runs["sums", seed, rule, step, start] for seed in seeds]
            table[rule][start] = {name: summary([row.get(name) for row in rows]) for name in _NUMBERS}
            accuracy[rule, start] = [row["accuracy"] for row in rows]
    rules = {}
    best = max(STARTS, key=lambda start: sum(accuracy[FIXED, start]))
    for rule in RULES:
        by_seed = [sum(each) / len(each) for each in zip(*(accuracy[rule, s] for s in STARTS), strict=True)]
        rules[rule] = {
            "accuracy_over_starts": summary(by_seed),
            "minus_fixed_chosen_on_stories": difference(by_seed, accuracy[FIXED, fixed]),
            "minus_best_fixed": difference(by_seed, accuracy[FIXED, best]),
        }
    found: dict[str, Any] = {"benchmark": "minmax_duals", "seeds": seeds, **provenance()}
    found |= tuned | {"step_sizes": steps, "fixed_chosen_on_stories": fixed}
    found["errors"] = {name_of(cell): row["error"] for cell, row in runs.items() if "error" in row}
    return found | {"best_fixed_on_sums": best, "rules": rules, "sums": table, "stories": tuning}


def draw(found: dict[str, Any], path: Path) -> None:
    """Accuracy on sums over the first λ, a line for each rule with a dot for each seed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.9), constrained_layout=True)
    for number, (rule, rows) in enumerate(found["sums"].items()):
        places = [index + (number - 2) * 0.07 for index in range(len(STARTS))]
        for ax, name in zip(axes, ("accuracy", "late_violation"), strict=True):
            cells = [rows[start][name] for start in STARTS]
            (line,) = ax.plot(places, [cell["mean"] for cell in cells], label=rule, linewidth=1.2)
            for place, cell in zip(places, cells, strict=True):
                values = [value for value in cell["values"] if value is not None]
                ax.scatter([place] * len(values), values, s=12, color=line.get_color())
    for ax in axes:
        ax.set_xticks(range(len(STARTS)), [f"{start:g}" for start in STARTS])
        ax.set_xlabel("λ at the start")
    axes[0].set(title="the policy's accuracy on held-out sums", ylim=(0, 1.03))
    axes[1].set(title="mean violation in the second half", ylim=(0, None))
    axes[1].axhline(0.05, color="grey", linewidth=1)
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line."""
    parser = seeds_parser(__doc__, [461, 462, 463], "duals")
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=[451, 452])
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    found = report(options)
    publish(found, options.output)
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
