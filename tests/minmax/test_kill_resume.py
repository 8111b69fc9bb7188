"""The real command, killed with SIGKILL at any moment and resumed, ends as if it had not been killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STEPS, UNIFORM_KILLS, CHECKPOINT_KILLS = 60, 10, 4
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


class Command:
    """`rlhf-train minmax` on a tiny configuration, in processes of their own.

    Args:
        root: where the cache folders lie.
    """

    def __init__(self, root: Path) -> None:
        self.environment = os.environ | {
            "XDG_CACHE_HOME": str(root / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPYCACHEPREFIX": str(root / "bytecode"),  # starting is then faster
        }
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start a run in a folder, or resume the one that left its config there."""
        resumable = (folder / "config.json").exists()
        options = ["--resume", str(folder)] if resumable else ["--output-dir", str(folder)]
        if not resumable:
            options += [option for key, value in SETTINGS.items() for option in ("--set", f"{key}={value}")]
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

    def kill(self, folder: Path, now: Callable[[float], bool]) -> bool:
        """Run until `now(seconds since the start)`, then SIGKILL; whether that left something to do."""
        process, started = self.start(folder), time.monotonic()
        while process.poll() is None and not now(time.monotonic() - started):
            time.sleep(0.001)
        process.kill()
        output, _ = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), output.decode(errors="replace")
        return not (folder / "report.html").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path, float]:
    """The command, the folder of a run that nobody killed, and the seconds it took with its models cached."""
    root = tmp_path_factory.mktemp("whole")
    command = Command(root)
    started = time.monotonic()
    command.finish(root / "run")
    built = json.loads((root / "run" / "results.json").read_text())["wall_time"]["demo"]
    return command, root / "run", time.monotonic() - started - built


def assert_same(folder: Path, other: Path) -> None:
    """Metrics but for the wall clock, samples and final players agree to the bit."""
    assert rows(folder) == rows(other)
    assert rows(folder / "plain") == rows(other / "plain")
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    for name in ("preflight.json", "samples.jsonl", "config.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    for role in ("policy", "monitor"):
        name = f"final/{role}/adapter_model.safetensors"
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    mine, its = (json.loads((path / "results.json").read_text()) for path in (folder, other))
    for block in ("before", "plain", "after"):
        assert mine[block] == its[block]


def rows(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "step_time"} for line in lines]


def remaining(folder: Path) -> float:
    """Share of the run's steps that are not logged yet."""
    path = folder / "metrics.jsonl"
    return 1 - path.read_bytes().count(b"\n") / STEPS if path.exists() else 1.0


@pytest.mark.slow
def test_kills_at_uniform_moments(tmp_path, whole):
    command, uninterrupted, seconds = whole
    rng, kills, runs = random.Random(0), [], [tmp_path / "run-0"]
    while len(kills) < UNIFORM_KILLS:
        run = runs[-1]
        moment = rng.uniform(0, seconds * (STARTING + (1 - STARTING) * remaining(run)))
        if command.kill(run, lambda elapsed, moment=moment: elapsed >= moment):
            kills.append((len(runs), round(moment, 1), round(1 - remaining(run), 2)))
        else:
            runs.append(tmp_path / f"run-{len(runs)}")
    print(f"killed (run, seconds after its start, share of steps logged): {kills}; {seconds:.0f} s in all")
    if not (runs[-1] / "report.html").exists():
        command.finish(runs[-1])
    for run in runs:
        assert_same(run, uninterrupted)


@pytest.mark.slow
def test_kills_during_checkpoint_writes(tmp_path, whole):
    command, uninterrupted, _ = whole
    rng, caught, run = random.Random(7), [], tmp_path / "run"
    for _ in range(CHECKPOINT_KILLS):
        after = rng.randrange(1, 8)  # that many checkpoints after this start
        old = {path.name for path in run.glob(".checkpoint-*tmp*")}
        state = {"seen": set(), "end": None}
        delay = rng.uniform(0, 0.02)  # seconds into the write

        def now(elapsed, old=old, state=state, after=after, delay=delay):
            if state["end"] is None:
                state["seen"] |= {path.name for path in run.glob(".checkpoint-*tmp*")} - old
                if len(state["seen"]) >= after:
                    state["end"] = elapsed + delay
            return state["end"] is not None and elapsed >= state["end"]

        assert command.kill(run, now)
        caught.append(sorted(path.name for path in run.glob(".*tmp*")))
    print(f"left behind by the kills: {caught}")
    assert any(caught)
    command.finish(run)
    assert_same(run, uninterrupted)
    assert not list(run.glob(".*tmp*"))
