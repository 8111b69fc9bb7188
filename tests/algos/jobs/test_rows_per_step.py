"""A run that goes on with another number of processes keeps the rows of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos import METHODS
from rlhf_algos.checkpoints.manager import CheckpointManager
from rlhf_algos.jobs.training_job import with_rows_per_step
from rlhf_data import RunFolder


def _run(folder: Path, **state: int) -> RunFolder:
    run = RunFolder.create(folder)
    manager = CheckpointManager(run, keep=1, metric="eval_loss", greater_is_better=False)
    with manager.writing(1, {"epoch": 0.1, **state}):
        pass
    return run


def test_each_process_takes_its_share_of_the_rows_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 rows a step are 6 x 2 of one process, 3 x 2 of each of two, and cannot be shared by four."""
    values = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    config = METHODS["sft"].resolve(values, where="test")
    run = _run(tmp_path / "run", rows_per_step=12)
    assert with_rows_per_step(run, config) is config
    assert with_rows_per_step(_run(tmp_path / "older"), config) is config
    assert with_rows_per_step(RunFolder.create(tmp_path / "new"), config) is config
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = with_rows_per_step(run, config)
    assert shared.per_device_train_batch_size == 3
    assert shared.to_dict() == config.to_dict() | {"per_device_train_batch_size": 3}
    monkeypatch.setenv("WORLD_SIZE", "4")
    with raises_error("different_training_data"):
        with_rows_per_step(run, config)


def test_completions_of_online_methods_are_shared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 prompts of a rollout in 3 optimizer steps, 4 completions each: 16 completions a step, 8 of two."""
    values = {"per_device_train_batch_size": 16, "num_generations": 4, "steps_per_generation": 3}
    config: Any = METHODS["grpo"].resolve(values, where="test")
    run = _run(tmp_path / "run", rows_per_step=12)
    assert config.prompts_per_step(1) == 12 and with_rows_per_step(run, config) is config
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared: Any = with_rows_per_step(run, config)
    assert shared.to_dict() == config.to_dict() | {"per_device_train_batch_size": 8}
    assert shared.prompts_per_step(2) == 12
    monkeypatch.setenv("WORLD_SIZE", "3")
    with raises_error("different_training_data"):
        with_rows_per_step(run, config)
