"""Training processes on a cluster: what is refused before Ray starts, and how few share the rows of many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos import METHODS, trainers
from rlhf_data import RunFolder
from rlhf_train.trainers import processes_of, share_rows, train_on_cluster

_FOUR = {"distributed": {"trainer_workers": 4}, "per_device_train_batch_size": 3}


def test_missing_rows_are_refused_before_ray_starts(
    train_refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rlhf_algos.run_trainers", lambda *_: pytest.fail("Ray was started"), raising=False)
    said = train_refused("sft", "--train-data", "none.jsonl", "--set", "distributed.trainer_workers=2")
    assert "none.jsonl does not exist" in said


def test_torchrun_and_a_cluster_are_not_combined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = METHODS["sft"].resolve(_FOUR)
    cluster = trainers(config)
    assert cluster is not None and processes_of(config) == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises_error("conflicting_options"):
        train_on_cluster(cluster, config, RunFolder(tmp_path), lambda again: None, job="sft", trains=True)


def test_fewer_processes_share_the_rows_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    values: dict[str, Any] = METHODS["sft"].resolve(_FOUR).to_dict()
    for processes, rows in ((4, 3), (2, 6), (1, 12)):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        assert share_rows(values, RunFolder(tmp_path))["per_device_train_batch_size"] == rows
    monkeypatch.setenv("WORLD_SIZE", "5")
    with raises_error("conflicting_options"):
        share_rows(values, RunFolder(tmp_path))
