"""Runs on a Ray cluster that are stopped, lose a machine or get one: the game, two training processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from files import metrics_of
from ray_faults import RayCluster, ray_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.proof,  # minutes each; what a cluster loses is in CI with GRPO
    pytest.mark.usefixtures("ray_installed"),
]
_GAME = {"max_steps": 6, "save_steps": 2, "prompts_per_batch": 1}
_SFT = {"story_rows": 200, "per_device_train_batch_size": 4, "max_steps": 24, "save_steps": 6}
_PATIENCE = 900.0
"""Seconds."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A game without Ray, on as many threads as workers have."""
    run = tmp_path_factory.mktemp("game") / "whole"
    process = _started(run, "minmax", "--quick", *_settings(_GAME, "training."), "--set", "baseline=false")
    assert process.wait(_PATIENCE) == 0, _said(run)
    return run


def test_a_game_that_gets_sigterm_goes_on_elsewhere(undisturbed: Path, tmp_path: Path):
    run = tmp_path / "run"
    with ray_cluster() as cluster:
        process = _game(run, cluster, workers=2)
        _wait_for(run / "checkpoint-2", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE) == 128 + signal.SIGTERM, _said(run)
        _ended_as(undisturbed, run, _game(run, cluster, workers=1))


def test_a_game_that_loses_the_head_goes_on_in_another_cluster(undisturbed: Path, tmp_path: Path):
    run = tmp_path / "run"
    with ray_cluster() as cluster:
        process = _game(run, cluster, workers=2)
        _wait_for(run / "checkpoint-4", process)
        cluster.kill_head()
        assert process.wait(_PATIENCE) == 1, _said(run)
    with ray_cluster() as cluster:
        _ended_as(undisturbed, run, _game(run, cluster, workers=3))


def test_one_of_two_machines_that_train_is_killed(tmp_path: Path, run_processes: Callable[..., str]):
    whole, run = _with_a_machine_killed(tmp_path, run_processes, {"trainer_workers": 2}, replace=True)
    assert metrics_of(run) == metrics_of(whole)
    assert (run / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()


def test_a_lost_machine_that_nothing_replaces_ends_the_run(tmp_path: Path):
    run = tmp_path / "run"
    with ray_cluster(cpus=1) as cluster:
        cluster.add_machine()
        words = ["sft", *_settings(_SFT), *_on(cluster, run, trainer_workers=2, start_timeout=15)]
        process = _started(run, *words)
        _wait_for(run / "checkpoint-12", process)
        cluster.kill_machine(replace=False)
        assert process.wait(_PATIENCE) == 2, _said(run)
    assert "no room for the training processes" in _said(run) and "--resume" in _said(run)


def test_training_goes_on_with_fewer_machines(tmp_path: Path, run_processes: Callable[..., str]):
    section = {"trainer_workers": 2, "min_trainer_workers": 1}
    whole, run = _with_a_machine_killed(tmp_path, run_processes, section, replace=False)
    left, undisturbed = metrics_of(run), metrics_of(whole)
    assert [row["step"] for row in left] == [row["step"] for row in undisturbed]
    for row, expected in zip(left, undisturbed, strict=True):
        assert _numbers(row) == pytest.approx(_numbers(expected), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_game_takes_up_a_machine_that_joins(workers: int, tmp_path: Path):
    """It goes on in two processes, as an undisturbed game does; a worker's room is not counted as theirs."""
    run, whole, game = tmp_path / "run", tmp_path / "whole", {**_GAME, "max_steps": 400}
    words = ["minmax", "--quick", *_settings(game, "training."), "--set", "baseline=false"]
    given = {"trainer_workers": 2, "min_trainer_workers": 1} | ({"rollout_workers": 1} if workers else {})
    with ray_cluster(cpus=1 + workers) as cluster:
        process = _started(run, *words, *_on(cluster, run, **given))
        _wait_for(run / "checkpoint-2", process)
        cluster.add_machine()
        _wait_until(lambda: "resumed from step" in _log(run), process, run)
        joined = int(_log(run).partition("resumed from step ")[2].split()[0])
        _stop_after(joined + 1, process, run)
    assert "there is room for 2 training processes now" in _log(run)
    _stop_after(joined + 1, _started(whole, *words), whole)
    grown, undisturbed = metrics_of(run), metrics_of(whole)
    assert [row["step"] for row in grown] == list(range(1, len(grown) + 1))
    assert grown[:joined] == undisturbed[:joined]
    first, expected = _numbers(grown[joined]), _numbers(undisturbed[joined])
    assert first == pytest.approx(expected, rel=1e-3, abs=1e-3)  # sums of two halves


def _with_a_machine_killed(
    folder: Path, run_processes: Callable[..., str], section: dict[str, int], *, replace: bool
) -> tuple[Path, Path]:
    """The folders of an undisturbed run and of one on two machines, one of which was killed in the middle."""
    whole, run = folder / "whole", folder / "run"
    words = ["sft", *_settings(_SFT)]
    run_processes(["-m", "rlhf_train", *words, "--output-dir", whole])
    with ray_cluster(cpus=1) as cluster:
        cluster.add_machine()
        process = _started(run, *words, *_on(cluster, run, **section))
        _wait_for(run / "checkpoint-12", process)
        cluster.kill_machine(replace=replace)
        assert process.wait(_PATIENCE) == 0, _said(run)
    assert "a training process was lost" in _said(run)
    return whole, run


def _settings(values: dict[str, Any], prefix: str = "") -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{prefix}{key}={value}")]


def _on(cluster: RayCluster, run: Path, **section: int) -> list[str]:
    file = run.with_name("distributed.json")
    file.write_text(json.dumps({"address": cluster.address, "start_timeout": 200, **section}))
    return ["--distributed", str(file)]


def _game(run: Path, cluster: RayCluster, *, workers: int) -> subprocess.Popen[bytes]:
    """The game on a cluster; resumed if it has begun."""
    words = ["--quick", *_settings(_GAME, "training."), "--set", "baseline=false"]
    words = ["--resume", str(run)] if run.exists() else words
    return _started(run, "minmax", *words, *_on(cluster, run, rollout_workers=workers))


def _started(run: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "OMP_NUM_THREADS": "1"}
    folder = [] if "--resume" in words else ["--output-dir", str(run)]
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rlhf_train", *words, *folder], stdout=log, stderr=log, env=environment
        )


def _log(run: Path) -> str:
    return run.with_suffix(".log").read_text(encoding="utf-8")


def _said(run: Path) -> str:
    return _log(run)[-6000:]


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Without the tokens, of which two processes compute those of a shared prompt twice."""
    return {
        key: value for key, value in row.items() if isinstance(value, (int, float)) and key != "num_tokens"
    }


def _stop_after(steps: int, process: subprocess.Popen[bytes], run: Path) -> None:
    metrics = run / "metrics.jsonl"
    _wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps, process, run)
    process.send_signal(signal.SIGTERM)
    assert process.wait(_PATIENCE) == 128 + signal.SIGTERM, _said(run)


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    _wait_until(path.exists, process, path.parent)


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], run: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        assert process.poll() is None and time.monotonic() < end, _said(run)
        time.sleep(0.02)


def _ended_as(whole: Path, run: Path, process: subprocess.Popen[bytes]) -> None:
    """A game ends well, with the bytes of another one."""
    assert process.wait(_PATIENCE) == 0, _said(run)
    assert metrics_of(run) == metrics_of(whole)
    files = [path.relative_to(whole) for path in (whole / "final").rglob("*.safetensors")]
    assert len(files) >= 2
    for file in (*files, Path("samples.jsonl")):
        assert (run / file).read_bytes() == (whole / file).read_bytes(), file
