"""Does the adversary matter where an answer makes several claims?  The game in the world of reports.

    uv run python benchmarks/minmax_proof/report_game.py --output benchmarks/results/minmax_reports.json

Every arm starts from the same built models and plays the same stories; none but `judge` has a constraint, and
so labels on verdicts.

- `minmax`: configs/minmax_reports.yaml. Of each answer a validator checks a claim that the monitor chooses
  and a random one, a call each. Plain RLHF is played beside it.
- `frozen`: the same with a monitor that does not learn.
- `cooperative`: the same with a monitor that is paid what the policy is paid.
- `monitor`: the monitor chooses both.
- `random`: both are random.
- `random_k`: the same with a penalty k = 4 times as high, on average that of checking everything.
- `all`: every sentence is checked.
- `judge`: a judge that reads critiques instead of the validator, and the truthfulness constraint.

Prints JSON: accuracy, hack rate, validator calls and the rest by arm, and differences from `minmax` with 95%
intervals over seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cells import arms_parser, difference, play_arms, publish, summary
from default_run import run

CONFIG = Path(__file__).parents[2] / "configs" / "minmax_reports.yaml"
CHECKED = ["--config", str(CONFIG)]
FROZEN = [*CHECKED, "--no-baseline", "--set", "training.monitor_updates_per_policy=0"]
TWO = ["--set", "game.policy_critiques=2"]
RANDOM = [*FROZEN, "--set", "judge_model.checks=random", *TWO]
ARMS = {
    "minmax": CHECKED,
    "frozen": FROZEN,
    "cooperative": [*CHECKED, "--no-baseline", "--set", "game.adversary_weight=-1"],
    "monitor": [*CHECKED, "--no-baseline", "--set", "judge_model.checks=monitor", *TWO],
    "random": RANDOM,
    "random_k": [*RANDOM, "--set", "game.w_judge=4"],
    "all": [*FROZEN, "--set", "judge_model.checks=all"],
    "judge": ["--set", "data.world=reports", "--no-baseline"],
}


def play(seed: int, arm: str, work: Path) -> dict[str, Any]:
    """One run; see `cells.play_cells`."""
    return run([*ARMS[arm], "--seed", str(seed)], work / f"run-{seed}-{arm}", work)


def main() -> None:
    """Command line."""
    options = arms_parser(__doc__, ARMS, range(211, 219), "report_game").parse_args()
    runs, found = play_arms(play, options, "minmax_reports")
    first = options.arms[0]
    for arm in options.arms:
        rows = [runs[seed, arm] for seed in options.seeds]
        names = dict.fromkeys(name for row in rows for name in row if name != "error")
        found[arm] = {name: summary([row.get(name) for row in rows]) for name in names}
        if arm != first and not any(
            "error" in runs[seed, one] for seed in options.seeds for one in (arm, first)
        ):
            accuracies = [[runs[seed, one]["accuracy"] for seed in options.seeds] for one in (first, arm)]
            found[arm]["accuracy_below_the_first_arms"] = difference(*accuracies)
    publish(found, options.output)


if __name__ == "__main__":
    main()
