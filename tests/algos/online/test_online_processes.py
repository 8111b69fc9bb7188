"""GRPO and PPO on two processes: the first rollout and ten updates are those of one; resuming is exact."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from proofs import in_ci
from rlhf_algos.tracking.run_facts import MACHINE_KEYS
from rlhf_data import RunFolder

WORKER = Path(__file__).parents[1].joinpath("online_worker.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def train(run_processes: Callable[..., str]) -> Callable[..., list[dict[str, Any]]]:
    """Trains every job; what each process said of each."""

    def call(mode: str, folder: Path, *options: Any, processes: int = 2) -> list[dict[str, Any]]:
        run_processes([WORKER, mode, folder, *options], processes=processes)
        said = [json.loads(path.read_text()) for path in sorted(folder.glob("*/said-*.json"))]
        assert {row["processes"] for row in said} == {processes}
        return said

    return call


@pytest.fixture(scope="module")
def single(train: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The run folders of a single process, and what it said."""
    folder = tmp_path_factory.mktemp("single")
    return folder, train("one", folder / "runs", folder / "rollouts.json", processes=1)


def rows(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if k not in MACHINE_KEYS and not k.startswith("time/")}
        for row in RunFolder(folder).read_metrics()
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "final").rglob("*.safetensors"))
    return {f"{path.parent.name} {name}": t for path in files for name, t in load_file(path).items()}


def same_first_rollout(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    """Process 0 samples prompts 0 and 2, process 1 samples prompt 1."""
    for row in one:
        parts = {each["rank"]: each["first"] for each in two if each["job"] == row["job"]}
        together = [parts[0][0], parts[1][0], parts[0][1]]
        for mine, theirs in zip(row["first"], together, strict=True):
            for (ids, logps), (other_ids, other_logps) in zip(mine, theirs, strict=True):
                assert ids == other_ids
                assert logps == pytest.approx(other_logps, abs=1e-5)


@pytest.mark.parametrize("mode", in_ci(["ddp", "fsdp", "zero3"], "fsdp"))
def test_two_processes_compute_what_one_does_and_resume_to_the_bit(
    mode: str, train: Any, single: Any, tmp_path: Path
) -> None:
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    folder, said = single
    runs = tmp_path / "runs"
    same_first_rollout(said, train(mode, runs, folder / "rollouts.json"))
    jobs = sorted(path.name for path in runs.iterdir())
    assert jobs == sorted(path.name for path in (folder / "runs").iterdir())
    whole = {job: (rows(runs / job), weights(runs / job)) for job in jobs}
    for job in jobs:
        alone, trained = rows(folder / "runs" / job), weights(folder / "runs" / job)
        assert len(alone) == len(whole[job][0]) == 10
        for mine, theirs in zip(alone, whole[job][0], strict=True):
            counts = {"num_tokens"}  # a prefix that two processes share is computed on both
            assert mine.keys() == theirs.keys()
            for key in mine.keys() - counts:
                assert theirs[key] == pytest.approx(mine[key], rel=1e-4, abs=1e-5), (job, key, mine["step"])
        for name, tensor in trained.items():
            torch.testing.assert_close(whole[job][1][name], tensor, rtol=0, atol=2e-5)
    for job in jobs:
        shutil.rmtree(runs / job / "checkpoint-10")
        shutil.rmtree(runs / job / "final")
    train(mode, runs, folder / "rollouts.json", "resume")
    for job in jobs:
        assert rows(runs / job) == whole[job][0]
        for name, tensor in weights(runs / job).items():
            assert torch.equal(tensor, whole[job][1][name])
