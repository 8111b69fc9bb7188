"""The real command, killed with SIGKILL at any moment and resumed, ends as if it had not been killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from files import CLOCK as STEP_CLOCK
from files import read_json
from rlhf_data import RunFolder, atomic_write_json

STEPS, UNIFORM_KILLS, CHECKPOINT_KILLS, EVERYTHING_KILLS = 60, 10, 4, 10
STARTING = 0.3
"""About the share of an uninterrupted run that every start takes before it plays."""
SETTINGS = {
    "demo.pretrain_steps": 30,
    "demo.sft_steps": 20,
    "demo.reward_steps": 10,
    "demo.judge_steps": 20,
    "demo.batch_size": 16,
    "demo.num_stories": 64,
    "demo.flawed_reward": "false",
    "force": "true",
    "data.train_stories": 64,
    "data.eval_stories": 12,
    "data.probe_stories": 8,
    "policy_model.max_new_tokens": 8,
    "policy_model.lora_dropout": 0.1,
    "monitor_model.max_new_tokens": 12,
    "monitor_model.lora_dropout": 0.1,
    "training.batch_size": 4,
    "training.max_steps": STEPS,
    "training.monitor_warmup_steps": STEPS - 30,
    "training.save_steps": 1,
    "training.eval_steps": 25,
}
MORE = (
    "demo.pretrain_steps=90",
    "training.max_steps=20",
    "training.batch_size=2",
    "training.monitor_updates_per_policy=2",
    "training.eval_steps=4",
    "game.num_generations=2",
    "game.num_critiques=2",
    "policy_model.lora_dropout=0.1",
    "monitor_model.lora_dropout=0.1",
    "training.monitor_steps=16",
    "constraint.smoothing=0.9",
    "guards.patience=1",
    "held_out.reward_model.model_name=null",
    "held_out.judge.kind=rule",
    "diagnostics.exploitability_stories=4",
    "diagnostics.best_response_updates=1",
)
"""What `everything` leaves out for short runs in process; a guard that acts in so weak a game."""
CLOCK = ("wall_time", "resumed")
"""Results that tell of the session, not of the run."""
UNORDERED = ("adapter_config.json", "checksums.json", "base_model.json")
"""peft writes an adapter's target modules, which are a set, in an order of each process's own; the last holds
the way from this folder to the base."""
Moment = Callable[[float], bool]
"""Whether to kill now, some seconds after the start of a process."""


class Command:
    """`rlhf-train minmax` on a tiny configuration, in processes of their own.

    Args:
        root: where the cache folders lie.
        options: the command line's, of a run that starts.
    """

    def __init__(self, root: Path, options: Sequence[str]) -> None:
        self.options = options
        self.environment = os.environ | {"XDG_CACHE_HOME": str(root / "cache"), "OMP_NUM_THREADS": "1"}

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start a run in a folder, or resume the one that left its config there."""
        resumable = (folder / "config.json").exists()
        options = ["--resume", str(folder)] if resumable else ["--output-dir", str(folder), *self.options]
        program = str(Path(sys.executable).with_name("rlhf-train"))
        return subprocess.Popen(
            [program, "minmax", *options],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def finish(self, folder: Path) -> None:
        """Run to the end, which must be a good one."""
        process = self.start(folder)
        output, _ = process.communicate()
        assert process.returncode == 0, output.decode(errors="replace")

    def kill(self, folder: Path, now: Moment) -> bool:
        """Run until `now(seconds since the start)`, then SIGKILL; whether that left something to do."""
        process, started = self.start(folder), time.monotonic()
        try:
            while process.poll() is None and not now(time.monotonic() - started):
                time.sleep(0.001)
        finally:
            process.kill()
        output, _ = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), output.decode(errors="replace")
        return not (folder / "report.html").exists()


@dataclass(frozen=True)
class Whole:
    """A run that nobody killed.

    Args:
        command: what ran it.
        folder: its run folder.
        seconds: how long it takes with its models cached.
    """

    command: Command
    folder: Path
    seconds: float

    @classmethod
    def play(cls, root: Path, options: Sequence[str]) -> Whole:
        """Play it."""
        command, started = Command(root, options), time.monotonic()
        command.finish(root / "run")
        built = read_json(root / "run" / "results.json")["wall_time"]["demo"]
        return cls(command, root / "run", time.monotonic() - started - built)

    def remaining(self, folder: Path) -> float:
        """Share of the run's steps that another run has not logged yet."""
        logged, steps = (
            sum(path.read_bytes().count(b"\n") for path in run.rglob("metrics.jsonl"))
            for run in (folder, self.folder)
        )
        return 1 - logged / steps

    def moment(self, folder: Path, rng: random.Random, *, share: float = 1.0) -> Moment:
        """Any moment of the start and of the next share of what is left of another run."""
        end = rng.uniform(0, self.seconds * (STARTING + (1 - STARTING) * share * self.remaining(folder)))
        return lambda elapsed: elapsed >= end

    def kill_often(self, root: Path, count: int, choose: Callable[[int, Path], Moment]) -> list[Path]:
        """Kill runs `count` times, each until it is through; their folders.

        Args:
            root: where they go.
            count: kills that left something to do.
            choose: when to kill next, from the number of kills so far and the run's folder.
        """
        runs, kills = [root / "run-0"], []
        while len(kills) < count:
            run = runs[-1]
            if self.command.kill(run, choose(len(kills), run)):
                kills.append((run.name, round(1 - self.remaining(run), 2), half_written(run)))
            else:
                runs.append(root / f"run-{len(runs)}")
        print(f"killed (run, share of steps logged, left behind): {kills}; {self.seconds:.0f} s in all")
        if not (runs[-1] / "report.html").exists():
            self.command.finish(runs[-1])
        return runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    options = [option for key, value in SETTINGS.items() for option in ("--set", f"{key}={value}")]
    return Whole.play(tmp_path_factory.mktemp("whole"), options)


def assert_same(folder: Path, other: Path) -> None:
    """Metrics and results but for the clock, samples, last checkpoints and final players agree to the bit."""
    for part in (".", "plain"):
        steps = [row["step"] for row in rows(folder / part)]
        assert rows(folder / part) == rows(other / part)
        assert steps == list(range(1, len(steps) + 1))
    last = f"checkpoint-{len(rows(folder))}"
    assert RunFolder(folder).read_config() == RunFolder(other).read_config()
    for name in ("preflight.json", "samples.jsonl", last, "final"):
        mine, its = contents(folder / name), contents(other / name)
        assert {path for path in {*mine, *its} if mine.get(path) != its.get(path)} == set(), name
    assert contents(folder / last) and contents(folder / "final")
    mine, its = (read_json(path / "results.json") for path in (folder, other))
    for name in {*mine, *its} - {*CLOCK}:
        assert mine[name] == its[name], name


def contents(path: Path) -> dict[str, Any]:
    """What a file holds, or every file in a folder, but for the clock."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    held: dict[str, Any] = {
        str(f.relative_to(path)): f.read_bytes() for f in files if f.name not in UNORDERED
    }
    if (path / "trainer_state.json").exists():
        state = read_json(path / "trainer_state.json")
        state["log_history"] = [without_clock(row) for row in state["log_history"]]
        held["trainer_state.json"] = state
    return held


def rows(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [without_clock(json.loads(line)) for line in lines]


def without_clock(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(STEP_CLOCK)}


def half_written(run: Path) -> list[str]:
    """Checkpoints of game and plain baseline whose writing has begun and not ended."""
    begun = [path for folder in (run, run / "plain") for path in folder.glob(".checkpoint-*tmp*")]
    return sorted(str(path.relative_to(run)) for path in begun)


def in_a_write(run: Path, rng: random.Random, *, most: int) -> Moment:
    """Up to 20 ms into the writing of one of the next `most` checkpoints."""
    old, seen, ends = {*half_written(run)}, set[str](), list[float]()
    after, delay = rng.randint(1, most), rng.uniform(0, 0.02)

    def now(elapsed: float) -> bool:
        if not ends:
            seen.update({*half_written(run)} - old)
            if len(seen) >= after:
                ends.append(elapsed + delay)
        return bool(ends) and elapsed >= ends[0]

    return now


@pytest.mark.proof
@pytest.mark.slow
def test_kills_at_uniform_moments(tmp_path, whole):
    rng = random.Random(0)
    for run in whole.kill_often(tmp_path, UNIFORM_KILLS, lambda _, run: whole.moment(run, rng)):
        assert_same(run, whole.folder)


@pytest.mark.proof
@pytest.mark.slow
def test_kills_during_checkpoint_writes(tmp_path, whole):
    rng, caught, run = random.Random(7), [], tmp_path / "run"
    for _ in range(CHECKPOINT_KILLS):
        assert whole.command.kill(run, in_a_write(run, rng, most=7))
        caught += half_written(run)
    assert caught
    whole.command.finish(run)
    assert_same(run, whole.folder)
    assert not half_written(run)


@pytest.mark.proof
@pytest.mark.slow
def test_kills_with_everything_switched_on(tmp_path, make_config, everything):
    """Dual ascent, critic, guards, past players, held-out scorers and probes."""
    config = make_config(*everything, *MORE)
    atomic_write_json(tmp_path / "config.json", config.to_dict())
    whole = Whole.play(tmp_path / "whole", ["--config", str(tmp_path / "config.json")])
    assert_everything_happens(whole.folder)
    rng = random.Random(3)

    def choose(kills: int, run: Path) -> Moment:
        return in_a_write(run, rng, most=6) if kills % 2 else whole.moment(run, rng, share=0.4)

    for run in whole.kill_often(tmp_path, EVERYTHING_KILLS, choose):
        assert_same(run, whole.folder)


def assert_everything_happens(folder: Path) -> None:
    """What is switched on is also met in so short a run, so that a checkpoint has to hold it."""
    played, results = rows(folder), read_json(folder / "results.json")
    assert any(row.get("guard/rollbacks") or row.get("guard/policy_rollbacks") for row in played)
    updates = [bool(row.get("monitor/updates")) for row in played]
    assert True in updates[2:] and False in updates[2:], "the monitor never stops, or never learns"
    assert len({row.get("dual/lambda") for row in played} - {None}) > 1
    assert any("eval_minmax/heldout_reward" in row for row in played)
    assert all(results[block] for block in ("plain", "cross_play", "best_response", "past_best_responses"))
