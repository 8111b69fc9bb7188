"""Do the players settle?  Best responses and cross-play along the default game, on stories.

    uv run python benchmarks/minmax_proof/equilibrium.py --output benchmarks/results/minmax_equilibrium.json \
        --figure docs/images/equilibrium.png

Arms, with the default settings but for what is named, and the same built models on a seed:

- `minmax`: the default game.
- `frozen`: its monitor does not learn.
- `truth_only`: its monitor is paid for the truth alone, so nobody plays against the policy.
- `unconstrained`: λ is 0, so the monitor may lie.

Both players are kept every 8 steps, five pairs of them to the end, the last one included.  Each is probed: 8
rounds of updates of one player against the other, which is fixed, from the optimizer's start, at λ of that
step. A gain is the change of the game's value (standard deviations of the scores at the start) of greedy
players on held-out stories. Prints JSON: gains and the probes' violations by step, their sum without
the negative ones (exploitability), and mean cross-play tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cells import arms_parser, play_arms, publish, summary
from default_run import run

_PROBED = [
    "--no-baseline",
    "--set=diagnostics.best_response_updates=8",
    "--set=diagnostics.cross_play_steps=8",
]
ARMS = {
    "minmax": _PROBED,
    "frozen": [*_PROBED, "--set=training.monitor_updates_per_policy=0"],
    "truth_only": [*_PROBED, "--set=game.adversary_weight=0"],
    "unconstrained": [
        *_PROBED,
        "--set=training.constraint_penalty_lambda=0",
        "--set=constraint.rule=fixed",
    ],
}
_GAINS = {"policy": "policy/best_response_gain", "monitor": "monitor/best_response_gain"}
_LIES = {"policy": "policy/best_response_violation", "monitor": "monitor/best_response_violation"}


def play(seed: int, arm: str, work: Path) -> dict[str, Any]:
    """One run with its probes and its cross-play; see `cells.play_cells`."""
    folder = work / f"run-{seed}-{arm}"
    found = run([*ARMS[arm], "--seed", str(seed)], folder, work)
    if "error" in found:
        return found
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    proxies = {name: results[name]["minmax/exploitability"] for name in ("before", "after")}
    probes = results["past_best_responses"]
    return found | {"probes": probes, "cross_play": results["cross_play"], "proxy": proxies}


def by_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gains, violations and their sum at each probed step, over seeds."""
    found = []
    for probes in zip(*(row["probes"] for row in rows), strict=True):
        at: dict[str, Any] = {"step": probes[0]["step"]}
        at |= {f"{role}_gain": summary([probe[key] for probe in probes]) for role, key in _GAINS.items()}
        at |= {f"{role}_violation": summary([probe[key] for probe in probes]) for role, key in _LIES.items()}
        gap = [sum(max(probe[key], 0.0) for key in _GAINS.values()) for probe in probes]
        found.append(at | {"exploitability": summary(gap)})
    return found


def draw(found: dict[str, Any], arms: list[str], path: Path) -> None:
    """Both gains over the steps, and the mean cross-play table of the first arm."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), constrained_layout=True)
    for role, ax in zip(("policy", "monitor"), axes[:2], strict=True):
        for arm in arms:
            rows = found[arm]["probes"]
            means = [row[f"{role}_gain"]["mean"] for row in rows]
            ax.plot(
                [row["step"] for row in rows], means, marker="o", markersize=4, label=arm.replace("_", " ")
            )
        ax.axhline(0, color="grey", linewidth=1)
        ax.set(title=f"what more training gains the {role}", xlabel="step")
    axes[0].set_ylabel("standard deviations")
    axes[1].legend(frameon=False)
    table = found[arms[0]]["cross_play"]
    axes[2].pcolormesh(table["values"], cmap="cividis")
    steps = table["steps"]
    middle = (min(map(min, table["values"])) + max(map(max, table["values"]))) / 2
    for i, row in enumerate(table["values"]):
        for j, value in enumerate(row):
            color = "white" if value < middle else "black"
            axes[2].text(j + 0.5, i + 0.5, f"{value:.2f}", ha="center", va="center", color=color, fontsize=9)
    places = [i + 0.5 for i in range(len(steps))]
    axes[2].set_xticks(places, list(map(str, steps)))
    axes[2].set_yticks(places, list(map(str, steps)))
    axes[2].invert_yaxis()
    axes[2].set(title="value of policies against monitors", xlabel="monitor of step", ylabel="policy of step")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line."""
    parser = arms_parser(__doc__, ARMS, range(441, 444), "equilibrium")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    runs, found = play_arms(play, options, "minmax_equilibrium")
    for arm in options.arms:
        rows = [runs[seed, arm] for seed in options.seeds if "error" not in runs[seed, arm]]
        if not rows:
            continue
        numbers = ("accuracy", "hack_rate", "monitor", "lambda", "seconds")
        found[arm] = {name: summary([row[name] for row in rows]) for name in numbers}
        found[arm]["proxy_after"] = summary([row["proxy"]["after"] for row in rows])
        found[arm]["probes"] = by_step(rows)
        tables = [row["cross_play"] for row in rows]
        found[arm]["cross_play"] = {
            "steps": tables[0]["policy_steps"],
            **{
                key: [
                    [round(sum(cells) / len(cells), 4) for cells in zip(*lines, strict=True)]
                    for lines in zip(*(table[key] for table in tables), strict=True)
                ]
                for key in ("values", "verdict_accuracy")
            },
        }
    publish(found, options.output)
    if options.figure:
        draw(found, [arm for arm in options.arms if arm in found], options.figure)


if __name__ == "__main__":
    main()
