"""An iteration of MinMax against the same game done the padded way with separate models: time and memory.

8 stories, 4 answers each, 4 critiques of each answer that is criticised, 5 updates of the monitor and 1 of
the policy. Ours is `MinMaxTrainer` as it is: adapters on one backbone, packed prefix trees. The peer
(`minmax_padded.py`) has six models, rows with padding, and transformers' `generate`. Both have LoRA of one
rank, fp32, AdamW, random Llamas of one shape for players and scorers, the same tokens in a pass at most.

Both sides sample as many tokens, no end token among them; then what they have sampled is exchanged for the
same texts, so that either computes the same: log-probs, losses, and adapters after the first iteration must
agree, or there are no ratios. Each side has a process and does an iteration in turn. Memory is measured in
processes of their own, and compared with training the policy alone by this toolkit's PPO. Prints JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from offline_sides import print_to_stderr
from offline_vs_trl import SHAPES, describe
from online_compare import Side, SideProgram, gradient_difference
from online_pace import Task
from safetensors.numpy import load_file

from rlhf_data import UserError, atomic_write_json

MAX_DIFFERENCE = 1e-4
"""Of log-probs and of the first iteration's losses, in nats and units of the advantages' deviation."""
MAX_DRIFT = 1e-2
"""Of later iterations' losses, in the same units: they start from adapters that are apart already."""
MAX_MOVED = 1e-2
"""Of the adapters after an iteration: 2-norm of the difference over that of the way they have gone. AdamW's
steps are as long for the smallest gradients, which rounding turns round, as for the largest."""
ROLES = ("policy", "monitor")
LOADED = {
    "players": {"ours": "none", "padded": "none", "ppo": "none"},
    "players and scorers": {"ours": "models", "padded": "models", "ppo": "models"},
    "scorers on the backbone": {"ours": "adapters", "padded": "models", "ppo": "none"},
}
"""What each side has when memory is measured: no scorers; reward model and judge (PPO: reward model) as
models of their own; or as adapters on the players' backbone, against a PPO without a reward model."""
QUICK = {"shape": "tiny", "steps": 2, "sentences": 6, "answer_tokens": 6, "critique_tokens": 8}


def game(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Settings of the game; what is not named is the default."""
    return {
        "policy_model": {"model_name": str(folder / "base"), "max_new_tokens": options.answer_tokens},
        "monitor_model": {"model_name": str(folder / "base"), "max_new_tokens": options.critique_tokens},
        "reward_model": {"model_name": str(folder / "reward")},
        "judge_model": {"model_name": str(folder / "judge")},
        "data": {
            "train_data": str(folder / "train.jsonl"),
            "eval_data": str(folder / "eval.jsonl"),
        },
        "training": {
            "batch_size": 8,
            "max_steps": options.steps,
            "monitor_updates_per_policy": 5,
            "policy_updates": 1,
            "monitor_warmup_steps": 0,
            "max_tokens_per_batch": options.max_tokens_per_batch,
        },
        # No KL stop: both sides take all updates.
        "game": {"num_generations": 4, "num_critiques": 4, "policy_critiques": 4, "target_kl": 1e9},
    }


def write_inputs(folder: Path, settings: dict[str, Any], options: argparse.Namespace) -> None:
    """Write stories and models; needs a process, because of what libraries print."""
    print_to_stderr()
    from minmax_work import write_models, write_stories

    write_stories(folder, 8 * max(options.steps, 2), options.sentences)
    write_models(folder, options.shape, settings)


def take_turns(tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
    """Run sides, an iteration each in turn; their reports, and the memory they had before and at most."""
    sides: dict[str, Side] = {}
    reports: dict[str, list[dict[str, Any]]] = {task.side: [] for task in tasks}
    try:
        for task in tasks:
            sides[task.side] = Side(SideProgram(sys.executable, "minmax_sides.py", task))
        for step in range(tasks[0].steps):
            for name in sorted(sides, reverse=step % 2 == 1):
                reports[name].append(sides[name].step())
        for side in sides.values():
            side.close()
    finally:
        for side in sides.values():
            side.stop()
    return {
        name: {
            "reports": reports[name],
            "imported_mb": sides[name].start["config"]["imported_mb"],
            "peak_mb": reports[name][-1]["memory_mb"],
        }
        for name in sides
    }


def agreement(folder: Path, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How far the sides are apart.

    Returns:
        `logps`: largest difference of a completion token's log-prob before the first updates, by player;
        `losses`: largest difference of `minmax_sides.LOSSES` in each iteration; `adapters`: after the first
        iteration, the difference over the way gone, by player; `same`: whether all are small enough.
    """
    ours, padded = (found[side]["reports"] for side in ("ours", "padded"))
    apart: dict[str, Any] = {"logps": {}, "adapters": {}, "way": {}}
    for role in ROLES:
        pairs = zip(ours[0]["logps"][role], padded[0]["logps"][role], strict=True)
        apart["logps"][role] = max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))
        a, b = (load_file(folder / f"{side}-{role}.safetensors") for side in ("ours", "padded"))
        start = load_file(folder / role / "adapter_model.safetensors")
        moved = {
            name: {key: tensor[key] - start[key] for key in start}
            for name, tensor in (("ours", a), ("padded", b))
        }
        apart["adapters"][role] = gradient_difference(moved["ours"], moved["padded"])
        apart["way"][role] = max(float(abs(each).max()) for each in moved["padded"].values())
    apart["losses"] = [
        max(abs(x["losses"][name] - y["losses"][name]) for name in x["losses"])
        for x, y in zip(ours, padded, strict=True)
    ]
    updates = [report["updates"] for report in (*ours, *padded)]
    apart["same"] = (
        max(apart["losses"][0], *apart["logps"].values()) <= MAX_DIFFERENCE
        and max(apart["losses"]) <= MAX_DRIFT
        and max(apart["adapters"].values()) <= MAX_MOVED
        and all(each == [5, 1] for each in updates)
    )
    return apart


def times(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds of an iteration, on all processors together, and of its parts; the seconds of all."""
    parts = {name: statistics.median(each["parts"][name] for each in reports) for name in reports[0]["parts"]}
    seconds = [each["seconds"] for each in reports]
    return {
        "median": statistics.median(seconds),
        "cpu_median": statistics.median(each["cpu_seconds"] for each in reports),
        "parts": parts,
        "all": seconds,
    }


def measure_memory(task: Task) -> dict[str, Any]:
    """Peak memory of each side and of PPO alone, each in a process of its own that does two iterations.

    Returns:
        By what is loaded: MB above what the imports took, by side, and the ratios.
    """

    @functools.cache
    def above_imports(side: str, scorers: str) -> float:
        settings = task.settings | {"scorers": scorers}
        found = take_turns([replace(task, side=side, steps=2, settings=settings)])[side]
        return found["peak_mb"] - found["imported_mb"]

    measured: dict[str, Any] = {}
    for loaded, sides in LOADED.items():
        above = {side: above_imports(side, scorers) for side, scorers in sides.items()}
        ratios = {f"ours_of_{side}": above["ours"] / above[side] for side in ("padded", "ppo")}
        measured[loaded] = above | ratios
    return measured


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything; see benchmarks/README.md for the result's keys.

    Raises:
        UserError: a side fails.
    """
    settings = {"game": game(options, folder), "scorers": "models", "references": options.references}
    writer = get_context("spawn").Process(target=write_inputs, args=(folder, settings["game"], options))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise UserError(
            f"the {options.shape} models or their stories could not be made; see the messages above"
        )
    task = Task(
        folder=str(folder),
        prompts_per_step=8,
        num_generations=4,
        new_tokens=options.answer_tokens,
        steps=options.steps,
        threads=options.threads,
        settings=settings,
    )
    found = take_turns([replace(task, side=side) for side in ("ours", "padded")])
    apart = agreement(folder, found)
    seconds = {side: times(found[side]["reports"]) for side in ("ours", "padded")}
    return {
        **(_ratios(seconds["ours"], seconds["padded"]) if apart["same"] else {}),
        "seconds": seconds,
        "agreement": apart,
        "resident_mb": {side: found[side]["peak_mb"] for side in found},
        "peak_memory_mb": measure_memory(task) if apart["same"] and options.memory else None,
    }


def _ratios(ours: dict[str, Any], padded: dict[str, Any]) -> dict[str, Any]:
    """How many times as long the peer takes: iterations in turn, their parts, and processors' time."""
    return {
        "speedup": statistics.median(b / a for a, b in zip(ours["all"], padded["all"], strict=True)),
        "cpu_speedup": padded["cpu_median"] / ours["cpu_median"],
        "speedup_of_parts": {name: padded["parts"][name] / own for name, own in ours["parts"].items()},
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="9M", help="of all models (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="iterations of each side (default %(default)s)")
    parser.add_argument(
        "--sentences",
        type=int,
        default=60,
        help="of the longest story, of 5 tokens each (default %(default)s)",
    )
    parser.add_argument("--answer-tokens", type=int, default=16, help="default %(default)s")
    parser.add_argument("--critique-tokens", type=int, default=24, help="default %(default)s")
    parser.add_argument(
        "--max-tokens-per-batch", type=int, default=16384, help="of a pass, both sides (default %(default)s)"
    )
    parser.add_argument(
        "--references",
        choices=["copies", "adapters_off"],
        default="copies",
        help="the peer's: models of their own, or its players without their adapters (default %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (%(default)s)")
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to measure it, in seven processes of two iterations",
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, two short iterations")
    parser.add_argument("--output", type=Path, help="write the JSON to this file too")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    return options


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    options = parse(arguments)
    names = ("shape", "sentences", "answer_tokens", "critique_tokens", "max_tokens_per_batch")
    head = {"benchmark": "minmax_speed", **{name: getattr(options, name) for name in names}}
    head |= {"references": options.references, "threads": options.threads}
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = head | describe() | run(options, Path(folder))
    except UserError as error:
        sys.exit(f"error: {error}")
    if options.output:
        atomic_write_json(options.output, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
