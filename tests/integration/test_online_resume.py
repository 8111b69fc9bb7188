"""GRPO, PPO and all of RLHF, killed with SIGKILL at any moment and resumed, end as if they had not been."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_data.worlds.story_tasks import story_records

pytestmark = pytest.mark.slow
_SETTINGS: dict[str, Any] = {
    "story_rows": 14,  # an epoch has four steps, the last of them a short one
    "story_eval_rows": 4,
    "per_device_train_batch_size": 8,
    "num_generations": 2,
    "max_completion_length": 6,
    "max_tokens_per_batch": 300,
    "learning_rate": 3e-3,
    "warmup_steps": 5,
    "eval_steps": 4,
    "save_steps": 3,
    "sample_steps": 2,
    "max_steps": 12,
}
_LORA: dict[str, Any] = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.2, "disable_dropout": False}
_GRPO: dict[str, Any] = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.05, "num_generations": 4}
_PPO: dict[str, Any] = {
    "normalize_rewards": True,
    "kl_target": 0.1,
    "kl_horizon": 16,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "target_kl": 0.05,
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", _GRPO),
    "grpo-lora": ("grpo", _GRPO | _LORA),
    "ppo": ("ppo", _PPO),
    "ppo-shared-lora": ("ppo", _PPO | _LORA | {"value_model": "shared"}),
    "ppo-lora": ("ppo", _PPO | _LORA),
}
_MODEL = """
architecture: llama
vocab_size: 300
hidden_size: 16
num_layers: 2
num_heads: 2
intermediate_size: 32
max_seq_length: 256
"""
_REWARD = "length:target=9,unit=characters"
"""Of the six tokens of a completion some have more characters than others."""
_CLOCK = ("step_time", "time/rollout", "time/score", "time/update", "samples_per_second", "peak_memory_gb")
_STAGES = {"sft": "sft.jsonl", "reward": "preference.jsonl", "ppo": "prompts.jsonl"}

_SERVER = """
import contextlib, importlib, json, os, sys
import peft, rlhf_algos.jobs.training_job, rlhf_algos.jobs.rlhf, rlhf_eval, rlhf_train.commands.rlhf_story
import rlhf_train.display.training, transformers.models.llama.modeling_llama
from rlhf_train.cli import main
with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(ImportError):
    importlib.import_module("deepspeed")  # accelerate imports it where a model is saved
rlhf_eval.training_curves = lambda *args, **options: None  # drawing is most of so small a run
for line in sys.stdin:
    arguments, log = json.loads(line)
    child = os.fork()
    if not child:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        main(arguments, prog_name="rlhf-train")
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Reads orders, and runs the command for each in a process of its own, which has the imports done already."""


class Command:
    """`rlhf-train` in processes of its own.

    Args:
        server: a process that runs `_SERVER`.
    """

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def start(self, arguments: list[str], run: Path) -> int:
        """Start a run in a folder, or resume the one that left its config there; the process."""
        arguments = [*arguments, "--output-dir", str(run)]
        if (run / "config.json").exists():
            arguments = [arguments[0], "--resume", str(run)]
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([arguments, str(run.with_name(f"{run.name}.log"))]) + "\n")
        self._server.stdin.flush()
        return self._said()

    def finish(self, arguments: list[str], run: Path) -> None:
        """Run or resume to the end, which must be a good one."""
        self.start(arguments, run)
        assert self._said() == 0, run.with_name(f"{run.name}.log").read_text()

    def kill(self, arguments: list[str], run: Path, *, logged: str, after: int, wait: float = 0.0) -> None:
        """Start, and kill so many seconds after so many lines are in a file of the folder."""
        process = self.start(arguments, run)
        path = run / logged
        while not (path.exists() and path.read_bytes().count(b"\n") >= after):
            time.sleep(0.001)
            os.kill(process, 0)  # while it is there
        time.sleep(wait)
        os.kill(process, signal.SIGKILL)
        assert self._said() == -signal.SIGKILL, run.with_name(f"{run.name}.log").read_text()

    def _said(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield Command(server)


def arguments_of(name: str, folder: Path) -> list[str]:
    """The command of one of `RUNS`, but for its folder."""
    (folder / "model.yaml").write_text(_MODEL)
    method, settings = RUNS[name]
    values = _SETTINGS | settings | {"model_config": folder / "model.yaml", "reward": _REWARD}
    return [method, *(word for key, value in values.items() for word in ("--set", f"{key}={value}"))]


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in _CLOCK} for line in lines]


def assert_same(run: Path, other: Path) -> None:
    """Metrics but for the wall clock, samples, held-out metrics and final weights agree to the bit."""
    assert rows(run) == rows(other)
    assert [row["step"] for row in rows(run)] == list(range(1, len(rows(run)) + 1))
    names = sorted(path.relative_to(run) for path in (run / "final").rglob("*.safetensors"))
    names += [Path("samples.jsonl")] if (other / "samples.jsonl").exists() else []
    assert len(names) > 0
    for name in names:
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    mine, its = (json.loads((path / "results.json").read_text()) for path in (run, other))
    for block in ("before", "after", "num_tokens", "steps"):
        assert mine[block] == its[block]


@pytest.mark.parametrize("name", RUNS)
def test_killed_and_resumed_is_as_uninterrupted(name: str, command: Command, tmp_path: Path) -> None:
    arguments, run = arguments_of(name, tmp_path), tmp_path / "killed"
    command.finish(arguments, tmp_path / "whole")
    assert len(rows(tmp_path / "whole")) == _SETTINGS["max_steps"]
    rng = random.Random(name)
    for after in (rng.randrange(1, 5), rng.randrange(6, 11)):  # the second one kills a resumed run
        wait = rng.uniform(0, 0.03)  # within a rollout, an update, an evaluation or a checkpoint
        command.kill(arguments, run, logged="metrics.jsonl", after=after, wait=wait)
    command.finish(arguments, run)
    assert_same(run, tmp_path / "whole")
    assert not list(run.glob(".*tmp*"))


def test_killed_before_the_first_step(command: Command, tmp_path: Path) -> None:
    arguments = arguments_of("ppo", tmp_path)
    command.finish(arguments, tmp_path / "whole")
    run = tmp_path / "killed"
    for logged in ("config.json", "before.json"):
        command.kill(arguments, run, logged=logged, after=1)
    command.finish(arguments, run)
    assert_same(run, tmp_path / "whole")


def test_rlhf_killed_in_each_of_its_stages(command: Command, tmp_path: Path) -> None:
    for stage, file in _STAGES.items():
        kind: Any = {"reward": "preference", "ppo": "prompts"}.get(stage, stage)
        records = [dataclasses.asdict(each) for each in story_records(kind, 30, split="train", seed=1)]
        records = [{**row, **row.pop("columns", {})} for row in records]
        lines = [json.dumps({k: v for k, v in row.items() if v not in (None, "")}) + "\n" for row in records]
        (tmp_path / file).write_text("".join(lines))
    (tmp_path / "model.yaml").write_text(_MODEL)
    settings = [f"--set={stage}.save_steps=3" for stage in _STAGES] + ["--max-steps=8"]
    settings += [f"--set={stage}.per_device_train_batch_size=4" for stage in _STAGES]
    settings += [f"--set=sft.model_config={tmp_path / 'model.yaml'}", "--set=ppo.max_completion_length=6"]
    arguments = ["rlhf", f"--data={tmp_path}", *settings]
    whole, run = tmp_path / "whole", tmp_path / "killed"
    command.finish(arguments, whole)
    rng = random.Random(5)
    for stage in _STAGES:
        after = rng.choice((2, 7))  # before the first checkpoint, or after the second
        logged = f"{stage}/metrics.jsonl"
        command.kill(arguments, run, logged=logged, after=after, wait=rng.uniform(0, 0.01))
    command.finish(arguments, run)
    for stage in _STAGES:
        assert_same(run / stage, whole / stage)
    mine, its = (json.loads((path / "results.json").read_text()) for path in (run, whole))
    assert mine["stages"] == its["stages"] and mine["after"] == its["after"]
