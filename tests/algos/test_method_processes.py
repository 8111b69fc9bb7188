"""Every method on two processes computes what it computes on one, and resumes to the bit."""

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

WORKER = Path(__file__).with_name("parallel_worker.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def train(run_processes: Callable[..., str]) -> Callable[..., list[str]]:
    """Trains every job; their names."""

    def call(mode: str, folder: Path, *options: str, processes: int = 2) -> list[str]:
        output = run_processes([WORKER, mode, folder, *options], processes=processes)
        said = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert {row["processes"] for row in said} == {processes}
        return [row["job"] for row in said]

    return call


@pytest.fixture(scope="module")
def single(train: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folders of a single process."""
    folder = tmp_path_factory.mktemp("single")
    train("one", folder, processes=1)
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    logged = RunFolder(folder).read_metrics()
    return [{k: v for k, v in row.items() if k not in MACHINE_KEYS} for row in logged]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "final").rglob("*.safetensors"))
    return {f"{path.parent.name} {name}": t for path in files for name, t in load_file(path).items()}


@pytest.mark.parametrize("mode", in_ci(["ddp", "fsdp", "zero1", "zero2", "zero3"], "ddp"))
def test_two_processes_compute_what_one_does_and_resume_to_the_bit(
    mode: str, train: Any, single: Path, tmp_path: Path
) -> None:
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    jobs = train(mode, tmp_path)
    assert sorted(jobs) == sorted(path.name for path in single.iterdir())
    whole = {job: (rows(tmp_path / job), weights(tmp_path / job)) for job in jobs}
    for job, (mine, tensors) in whole.items():
        assert len(mine) == 4
        for row, other in zip(mine, rows(single / job), strict=True):
            if row["step"] == 1:
                for each in (row, other):
                    each.pop("rewards/accuracies", None)  # all rewards are 0, but for the last bit
            # Which prefixes happen to meet in one micro-batch, and so the tokens, depends on the cut.
            mine_tokens, its_tokens = row.pop("num_tokens"), other.pop("num_tokens")
            assert mine_tokens == pytest.approx(its_tokens, rel=0.02), job
            for name in row.keys() & {"loss", "eval_loss"}:
                assert row[name] == pytest.approx(other[name], rel=1e-5), job
            rel = 1e-4 if job == "reward-lora" else 1e-5  # its largest reward is that of a single text
            assert row == pytest.approx(other, rel=rel, abs=2e-6), job
        expected = weights(single / job)
        assert set(tensors) == set(expected) and tensors
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4)
        shutil.rmtree(tmp_path / job / "checkpoint-4")
    train(mode, tmp_path, "resume")
    for job, (mine, tensors) in whole.items():
        again = rows(tmp_path / job)
        for row in again:
            del row["num_tokens"]
        again[0].pop("rewards/accuracies", None)
        assert again == mine, job
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in weights(tmp_path / job).items()), job


def test_one_prompt_for_two_processes(run_processes: Callable[..., str], tmp_path: Path) -> None:
    """In steps and in evaluation one of them has nothing to do, and waits for nothing."""
    settings = {"story_rows": 20, "story_eval_rows": 1, "per_device_train_batch_size": 4, "max_steps": 2}
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words = ["-m", "rlhf_train", "grpo", "--reward", "choice", *given, "--output-dir", tmp_path / "run"]
    run_processes(words)
    assert len(rows(tmp_path / "run")) == 2
