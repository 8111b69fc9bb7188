"""Does a limit on the KL hold where a fixed weight does not?  Plain RLHF against the flawed reward model.

    uv run python benchmarks/minmax_proof/kl_limit.py --output benchmarks/results/minmax_kl_limit.json

A policy is trained on the flawed reward model alone, on stories and on sums, with as many updates in
every arm: with fixed weights β of the KL to the reference (`game.beta`), or with a limit on it
(`kl_constraint`), whose multiplier is added to the default β.  Measured over the last quarter of the
steps: the mean KL in nats per token, of which the factor between the largest and the smallest of all runs of
an arm is what a user who chooses β or a limit does not know beforehand; and on held-out stories the accuracy
and the share of baits taken.  Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from cells import play_cells, provenance, summary

from rlhf_data import apply_overrides, atomic_write_json

WORLDS = ("stories", "sums")
BETAS = (0.02, 0.1, 0.3, 1.0)
LIMITS = (0.02, 0.05, 0.2)
COMMON = ("baseline=false", "force=true", "diagnostics.exploitability_stories=0")


def settings_of(arm: str) -> list[str]:
    """The settings of an arm such as `beta=0.1` or `limit=0.05`."""
    kind, _, value = arm.partition("=")
    if kind == "beta":
        return [f"game.beta={value}"]
    return [f"kl_constraint={{threshold: {value}, start: 0.1, lambda_max: 1000}}"]


def play(world: str, seed: int, arm: str, work: Path) -> dict[str, Any]:
    """One run; see `cells.play_cells`."""
    from rlhf_minmax import MinMaxConfig, MinMaxTrainer, build_game, load_stories, measure_scales
    from rlhf_minmax.evaluation.evaluate import evaluate

    started = time.perf_counter()
    given = [*COMMON, *settings_of(arm), f"seed={seed}", f"data.world={world}"]
    config = MinMaxConfig.from_dict(apply_overrides({}, given))
    stories = load_stories(config)
    pipeline = build_game(config, stories, cache_folder=work / "models").pipeline
    pipeline, _ = measure_scales(pipeline, stories.train[: config.data.probe_stories], seed=seed)
    steps: list[dict[str, Any]] = []
    trainer = MinMaxTrainer(
        pipeline,
        config,
        stories.train,
        adversary=False,
        on_step=lambda step, total, metrics: steps.append(dict(metrics)),
    )
    trainer.train()
    metrics = evaluate(pipeline, stories.held_out, pipeline.players.policy)
    last = [step["policy/kl"] for step in steps[-(len(steps) // 4) :]]
    return {
        "kl": sum(last) / len(last),
        "largest_kl": max(last),
        "multiplier": steps[-1].get("dual/kl/lambda"),
        "accuracy": metrics["policy/accuracy"],
        "hack_rate": metrics["policy/hack_rate"],
        "reward_score": metrics["policy/reward_score"],
        "steps": len(steps),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[411, 412, 413, 414, 415])
    parser.add_argument("--work", type=Path, default=Path("outputs/minmax_proof/kl_limit"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    arms = [*(f"beta={beta:g}" for beta in BETAS), *(f"limit={limit:g}" for limit in LIMITS)]
    built = [(world, seed, arms[0]) for world in WORLDS for seed in options.seeds]
    others = [(world, seed, arm) for arm in arms[1:] for world in WORLDS for seed in options.seeds]
    runs = play_cells(play, [built, others], options.work.resolve(), options.workers)
    by_arm: dict[str, list[tuple[str, dict[str, Any]]]] = {arm: [] for arm in arms}
    for (world, _, arm), run in zip([*built, *others], runs, strict=True):
        by_arm[arm].append((world, run))
    found = {"benchmark": "minmax_kl_limit", "seeds": options.seeds, **provenance(), "arms": {}}
    for arm, cells in by_arm.items():
        kls = [run["kl"] for _, run in cells]
        measured: dict[str, Any] = {"kl_largest_over_smallest": round(max(kls) / min(kls), 2)}
        for world in WORLDS:
            own = [run for name, run in cells if name == world]
            measured[world] = {name: summary([run[name] for run in own]) for name in own[0]}
        found["arms"][arm] = measured
    if options.output:
        atomic_write_json(options.output, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
