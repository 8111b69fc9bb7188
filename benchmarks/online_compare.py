"""What `grpo_vs_trl.py` and `ppo_vs_trl.py` share: prompts, two paced processes, and what is made of them."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from offline_vs_trl import HH_DATA, SHAPES, Pair, write_models
from online_pace import Task, gradients_file
from safetensors.numpy import load_file

from rlhf_data import UserError, atomic_write_json

HERE = Path(__file__).parent
MAX_DIFFERENCE = 1e-4
"""Of loss, rewards and gradients on the same completions, above which the two sides do not do the same."""


@dataclass(frozen=True)
class SideProgram:
    """What runs as a side: a Python and a script, and what it is to do."""

    python: str
    script: str
    task: Task


class Side:
    """A side's process, seen from the parent.

    Raises:
        UserError: from every method, when the process has ended by itself.
    """

    def __init__(self, program: SideProgram) -> None:
        task = program.task
        path = Path(task.path(f"{task.side}-task.json"))
        path.write_text(json.dumps(asdict(task)), encoding="utf-8")
        self._name = task.side
        self._process = subprocess.Popen(
            [program.python, str(HERE / program.script), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.start = self._receive()
        except UserError:
            self.stop()
            raise

    def step(self) -> dict[str, Any]:
        """Let it do a step; its report."""
        self._say("step")
        return self._receive()

    def close(self) -> None:
        """Let it end."""
        self._process.communicate("end\n")

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.communicate()

    def _say(self, word: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise UserError(f"the side {self._name!r} ended early; see its messages above") from error

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"the side {self._name!r} ended early; see its messages above")
        return json.loads(line)


def make_models(folder: Path, shape: str, pairs: list[Pair]) -> None:
    """Write `policy` and `reward` into the folder; in a process, because of what libraries print.

    Raises:
        UserError: it failed.
    """
    writer = get_context("spawn").Process(target=write_models, args=(folder, shape, pairs))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise UserError(f"the {shape} model could not be made; see the messages above")


def write_rows(
    path: Path,
    pairs: list[Pair],
    tokenizer: Any,
    *,
    count: int,
    replayed: int,
    completions: Sequence[int],
    prompt_length: int | None = None,
    grouped: bool = False,
) -> None:
    """Write the prompts of a run, with completions to replay, cut out of the pairs' texts.

    Args:
        path: JSON file to write.
        pairs: where the texts come from.
        tokenizer: of the model.
        count: prompts.
        replayed: the first prompts have completions, so many of them.
        completions: tokens of each completion of a prompt.
        prompt_length: tokens of each prompt; None takes the pairs' prompts as they are.
        grouped: put prompts of like length together.

    Raises:
        UserError: there are too few pairs.
    """
    prompts = [pair["prompt"] for pair in pairs]
    if prompt_length is not None:
        prompts = list(_cut(" ".join(prompts), tokenizer, prompt_length))
    if len(prompts) < count:
        raise UserError(f"the data give {len(prompts)} prompts, {count} are needed; take fewer --steps")
    prompts = prompts[:count]
    if grouped:
        prompts.sort(key=lambda prompt: len(tokenizer.encode(prompt)))
    pieces = list(_cut("".join(pair["chosen"] for pair in pairs), tokenizer, max(completions)))
    if len(pieces) < replayed * len(completions):
        raise UserError(
            f"the data give {len(pieces)} completions of {max(completions)} tokens; take shorter ones"
        )
    texts = iter(pieces)
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "prompt_ids": tokenizer.encode(prompt), "completions": []} for prompt in prompts
    ]
    for row in rows[:replayed]:
        row["completions"] = [tokenizer.encode(next(texts))[:length] for length in completions]
    path.write_text(json.dumps(rows), encoding="utf-8")


def _cut(text: str, tokenizer: Any, length: int) -> Iterator[str]:
    """Pieces of a text that are exactly so many tokens, also when they are read again."""
    ids = tokenizer.encode(text)
    for start in range(0, len(ids) - length + 1, length):
        piece = tokenizer.decode(ids[start : start + length])
        if tokenizer.encode(piece) == ids[start : start + length]:
            yield piece


def take_turns(programs: Sequence[SideProgram]) -> dict[str, Any]:
    """Run both sides, a step each in turn, and say what they took."""
    sides: dict[str, Side] = {}
    try:
        for program in programs:
            sides[program.task.side] = Side(program)
        reports: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for step in range(programs[0].task.steps):
            for name in sorted(sides, reverse=step % 2 == 1):
                reports[name].append(sides[name].step())
        for side in sides.values():  # neither side cleans up while the other one trains
            side.close()
    finally:
        for side in sides.values():
            side.stop()
    return {name: _measures(reports[name], sides[name].start) for name in sides}


def _measures(reports: list[dict[str, Any]], start: dict[str, Any]) -> dict[str, Any]:
    seconds = [report["seconds"] for report in reports]
    parts = {
        part: [report[part] for report in reports]
        for part in ("rollout", "score", "update")
        if part in reports[0]
    }
    return {
        "seconds_per_step": statistics.median(seconds),
        **{f"{part}_seconds_per_step": statistics.median(values) for part, values in parts.items()},
        "seconds": seconds,
        "rollout_seconds": parts["rollout"],
        "completion_length": statistics.mean(report["length"] for report in reports),
        "peak_memory_mb": reports[-1]["memory_mb"],
        "memory_before_training_mb": start["memory_mb"],
        "config": start["config"],
    }


def check(programs: Sequence[SideProgram]) -> dict[str, Any]:
    """A step of each side on the same completions: how far losses, rewards and gradients are apart.

    Returns:
        `loss` (absolute, in units of the advantages' deviation, which is 1), `rewards` (absolute) and
        `gradient` (2-norm of the difference over the norm, the largest of the updates).
    """
    found: dict[str, dict[str, Any]] = {}
    for program in programs:
        side = Side(replace(program, task=replace(program.task, check=True, steps=1)))
        try:
            found[program.task.side] = side.step()
            side.close()
        finally:
            side.stop()
    ours, trl = found["ours"], found["trl"]
    tasks = {program.task.side: program.task for program in programs}
    gradients, update = [], 0
    while gradients_file(tasks["trl"], update).exists():
        pair = [load_file(str(gradients_file(tasks[side], update))) for side in ("ours", "trl")]
        gradients.append(gradient_difference(*pair))
        update += 1
    rewards = zip(ours["rewards"], trl["rewards"], strict=True)
    return {
        "losses": [ours["loss"], trl["loss"]],
        "loss": abs(ours["loss"] - trl["loss"]),
        "rewards": max(abs(a - b) for a, b in rewards),
        "gradient": max(gradients),
        "updates": update,
    }


def gradient_difference(ours: dict[str, np.ndarray], trl: dict[str, np.ndarray]) -> float:
    """2-norm of the difference of two gradients over the norm of the second; of the names in both.

    Raises:
        UserError: the peer has a parameter with a gradient that we have not.
    """
    if missing := trl.keys() - ours.keys():
        raise UserError(f"TRL has gradients of parameters that we have not: {sorted(missing)}")
    difference = sum(float(np.square(ours[name].astype(np.float64) - trl[name]).sum()) for name in trl)
    norm = sum(float(np.square(trl[name].astype(np.float64)).sum()) for name in trl)
    return (difference / norm) ** 0.5


def verdict(sides: dict[str, Any], checked: dict[str, Any]) -> dict[str, Any]:
    """Ratios TRL / ours of time, ours / TRL of memory; None where the two did not do the same."""
    ours, trl = sides["ours"], sides["trl"]
    same = all(checked[name] <= MAX_DIFFERENCE for name in ("loss", "rewards", "gradient"))
    same = same and ours["completion_length"] == trl["completion_length"]

    def ratio(name: str) -> float | None:
        each = [b / a for a, b in zip(ours[name], trl[name], strict=True)]
        return statistics.median(each) if same else None

    return {
        "same": same,
        "speedup": ratio("seconds"),
        "rollout_speedup": ratio("rollout_seconds"),
        "memory_share": ours["peak_memory_mb"] / trl["peak_memory_mb"] if same else None,
    }


def compare(programs: Sequence[SideProgram]) -> dict[str, Any]:
    """Measure both sides, then check that they do the same."""
    sides = take_turns(programs)
    checked = check(programs)
    return {**verdict(sides, checked), "check": checked, **sides}


def programs(
    script: str, task: Task, *, ours: dict[str, Any], trl: dict[str, Any], trl_python: str = sys.executable
) -> list[SideProgram]:
    """The two sides of a comparison.

    Args:
        script: of both.
        task: of both.
        ours: further settings of our trainer.
        trl: further settings of TRL's.
        trl_python: that has the peer.
    """
    sides = (("ours", sys.executable, ours), ("trl", trl_python, trl))
    return [
        SideProgram(python, script, replace(task, side=side, settings=task.settings | settings))
        for side, python, settings in sides
    ]


def add_options(parser: argparse.ArgumentParser, peers: Sequence[str], *, steps: int) -> None:
    """The options that both benchmarks have."""
    parser.add_argument("--shape", choices=SHAPES, default="9M")
    parser.add_argument("--peers", nargs="+", choices=peers, default=list(peers))
    parser.add_argument("--new-tokens", type=int, default=64, help="of a completion (default %(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="iterations (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (%(default)s)")
    parser.add_argument(
        "--max-tokens-per-batch", type=int, default=1024, help="our token budget (default %(default)s)"
    )
    parser.add_argument("--data", type=Path, default=HH_DATA, help="preference pairs (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model on made-up texts, two iterations")
    parser.add_argument("--output", type=Path, help="merge the JSON into this file too")


def publish(
    rows: Iterable[dict[str, Any]],
    options: argparse.Namespace,
    head: dict[str, Any],
    *,
    key: Callable[[dict[str, Any]], Any],
    columns: Sequence[str],
) -> list[dict[str, Any]]:
    """Print rows as they come, and keep them in the output file beside those of other settings.

    Args:
        rows: results.
        options: `output`.
        head: what the file says besides.
        key: of a row: rows of one key replace each other; the file is sorted by it.
        columns: of a row: what tells the rows of the table apart.

    Returns:
        All rows of the file, or those that came.
    """
    new: list[dict[str, Any]] = []
    kept = new
    for row in rows:
        print(json.dumps(row, indent=2), flush=True)
        new.append(row)
        if options.output:
            old = json.loads(options.output.read_text()) if options.output.exists() else {}
            by_key = {key(each): each for each in [*old.get("comparisons", []), *new]}
            kept = [by_key[name] for name in sorted(by_key)]
            atomic_write_json(options.output, head | {"comparisons": kept})
    print(table(new, columns), file=sys.stderr)
    return kept


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """The results as a Markdown table; the columns name what tells the rows apart."""
    heads = [*columns, "s per iteration", "faster", "generation, s", "faster", "peak MB", "memory"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        ours, trl = row["ours"], row["trl"]

        def both(name: str, digits: int, ours: Any = ours, trl: Any = trl) -> str:
            return f"{ours[name]:.{digits}f} / {trl[name]:.{digits}f}"

        ratios = ["void"] * 3
        if row["same"]:
            ratios = [
                f"**{row['speedup']:.1f}x**",
                f"{row['rollout_speedup']:.1f}x",
                f"{row['memory_share']:.2f}x",
            ]
        cells = [str(row[column]) for column in columns]
        cells += [both("seconds_per_step", 2), ratios[0], both("rollout_seconds_per_step", 2), ratios[1]]
        lines.append(f"| {' | '.join([*cells, both('peak_memory_mb', 0), ratios[2]])} |")
    return "\n".join(lines)
