"""GRPO, PPO and all of RLHF, killed with SIGKILL at any moment and resumed, end as if they had not been."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from files import metrics_of, read_json, write_lines
from killed_runs import MODEL, Command, assert_same_run, train_server
from proofs import in_ci
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
_REWARD = "length:target=9,unit=characters"
"""Of the six tokens of a completion some have more characters than others."""
_STAGES = {"sft": "sft.jsonl", "reward": "preference.jsonl", "ppo": "prompts.jsonl"}


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    with train_server() as server:
        yield server


def arguments_of(name: str, folder: Path) -> list[str]:
    """The command of one of `RUNS`, but for its folder."""
    (folder / "model.yaml").write_text(MODEL)
    method, settings = RUNS[name]
    values = _SETTINGS | settings | {"model_config": folder / "model.yaml", "reward": _REWARD}
    return [method, *(word for key, value in values.items() for word in ("--set", f"{key}={value}"))]


@pytest.mark.parametrize("name", in_ci(RUNS, "grpo", "ppo-lora"))
def test_killed_and_resumed_is_as_uninterrupted(name: str, command: Command, tmp_path: Path) -> None:
    arguments, run = arguments_of(name, tmp_path), tmp_path / "killed"
    command.finish(arguments, tmp_path / "whole")
    assert len(metrics_of(tmp_path / "whole")) == _SETTINGS["max_steps"]
    rng = random.Random(name)
    for after in (rng.randrange(1, 5), rng.randrange(6, 11)):  # the second one kills a resumed run
        wait = rng.uniform(0, 0.03)  # within a rollout, an update, an evaluation or a checkpoint
        assert command.stop(arguments, run, after=after, wait=wait) == -signal.SIGKILL
    command.finish(arguments, run)
    assert_same_run(run, tmp_path / "whole")
    assert not list(run.glob(".*tmp*"))


def test_killed_before_the_first_step(command: Command, tmp_path: Path) -> None:
    arguments = arguments_of("ppo", tmp_path)
    command.finish(arguments, tmp_path / "whole")
    run = tmp_path / "killed"
    for logged in ("config.json", "before.json"):
        assert command.stop(arguments, run, logged=logged, after=1) == -signal.SIGKILL
    command.finish(arguments, run)
    assert_same_run(run, tmp_path / "whole")


def test_rlhf_killed_in_each_of_its_stages(command: Command, tmp_path: Path) -> None:
    for stage, file in _STAGES.items():
        kind: Any = {"reward": "preference", "ppo": "prompts"}.get(stage, stage)
        records = [dataclasses.asdict(each) for each in story_records(kind, 30, split="train", seed=1)]
        records = [{**row, **row.pop("columns", {})} for row in records]
        kept = [{k: v for k, v in row.items() if v not in (None, "")} for row in records]
        write_lines(tmp_path / file, kept)
    (tmp_path / "model.yaml").write_text(MODEL)
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
        wait = rng.uniform(0, 0.01)
        assert command.stop(arguments, run, logged=logged, after=after, wait=wait) == -signal.SIGKILL
    command.finish(arguments, run)
    for stage in _STAGES:
        assert_same_run(run / stage, whole / stage)
    mine, its = (read_json(path / "results.json") for path in (run, whole))
    assert mine["stages"] == its["stages"] and mine["after"] == its["after"]
