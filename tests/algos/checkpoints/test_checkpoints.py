"""Checkpoints: whole or absent, rolling, the best one kept, damage and full disks survived."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from raises import raises_error
from rlhf_algos.checkpoints.manager import STATE_FILE, CheckpointManager
from rlhf_data import RunFolder
from rlhf_data.runs.atomic import DiskFullError


def _write(manager, step, **metrics):
    with manager.writing(step, {"note": f"step {step}"}, metrics=metrics) as folder:
        save_file({"weight": torch.full((64,), float(step))}, folder / "model.safetensors")


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_checkpoints_roll_and_the_latest_is_found(tmp_path):
    manager = CheckpointManager(RunFolder(tmp_path), keep=2)
    assert manager.latest() is None and manager.best() is None
    for step in (2, 4, 10):
        _write(manager, step)
    assert _names(tmp_path) == ["checkpoint-10", "checkpoint-4"]
    latest = manager.latest()
    assert latest is not None
    assert _names(latest) == ["checksums.json", "model.safetensors", "trainer_state.json"]
    assert manager.read_state(latest) == {"step": 10, "note": "step 10"}


def test_state_is_written_last_and_a_failure_leaves_nothing(tmp_path):
    manager = CheckpointManager(RunFolder(tmp_path))
    with pytest.raises(OSError, match="disk on fire"), manager.writing(1, {}) as folder:
        assert not (folder / STATE_FILE).exists()
        raise OSError("disk on fire")
    assert list(tmp_path.iterdir()) == []


def test_incomplete_checkpoint_is_refused(tmp_path):
    with raises_error("incomplete_checkpoint"):
        CheckpointManager.read_state(tmp_path)
    (tmp_path / STATE_FILE).write_text("{")
    with raises_error("damaged_file"):
        CheckpointManager.read_state(tmp_path)


@pytest.mark.parametrize(
    ("metric", "greater", "values", "best"),
    [
        # lowest loss; of the two equal ones the earlier
        ("eval_loss", None, [0.9, 0.5, 0.7, 0.5, 0.8], 2),
        ("eval_accuracy", None, [0.2, 0.1, 0.9, 0.4, 0.3], 3),
        ("eval_accuracy", False, [0.2, 0.1, 0.9, 0.4, 0.3], 2),
        # NaN is never best, a checkpoint without an evaluation neither
        ("eval_loss", None, [float("nan"), 0.6, None, 0.7, 0.8], 2),
    ],
)
def test_the_best_checkpoint_stays_and_is_named(tmp_path, metric, greater, values, best):
    manager = CheckpointManager(RunFolder(tmp_path), keep=1, metric=metric, greater_is_better=greater)
    for step, value in enumerate(values, start=1):
        _write(manager, step, **({} if value is None else {metric: value}))
    assert _names(tmp_path) == sorted({f"checkpoint-{best}", "checkpoint-5"})
    state = manager.read_state(tmp_path / "checkpoint-5")
    assert state["best_model_checkpoint"] == f"checkpoint-{best}" and state["best_global_step"] == best
    assert state["best_metric"] == values[best - 1]
    assert state["log_history"] == [{"step": 5, metric: values[-1]}]
    # whoever takes the run up again knows the same
    again = CheckpointManager(RunFolder(tmp_path), keep=1, metric=metric, greater_is_better=greater)
    assert again.best() == tmp_path / f"checkpoint-{best}"


def test_a_run_of_the_game_goes_on_from_checkpoints_with_older_names(tmp_path):
    manager = CheckpointManager(RunFolder(tmp_path), keep=1, metric="eval_policy/accuracy")
    for step, name in enumerate(("eval/policy/accuracy", "eval_policy/accuracy"), start=1):
        _write(manager, step, **{name: 1 / step})
    assert manager.best() == tmp_path / "checkpoint-1"


DAMAGE = {
    "cut off": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-100]
    ),
    "bit flipped": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-1] + b"\x01"
    ),
    "file gone": lambda folder: (folder / "model.safetensors").unlink(),
    "bad JSON": lambda folder: (folder / STATE_FILE).write_text('{"step": 9, "not'),
    "no state": lambda folder: (folder / STATE_FILE).unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, kind):
    manager = CheckpointManager(RunFolder(tmp_path), keep=2)
    for step in (1, 2, 3):
        _write(manager, step)
    DAMAGE[kind](tmp_path / "checkpoint-3")
    assert manager.latest() == tmp_path / "checkpoint-2"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and f"{tmp_path}/checkpoint-3 is damaged" in record.getMessage()
    # training goes on from step 2: the damaged one must not push whole ones out
    _write(manager, 5)
    assert _names(tmp_path) == ["checkpoint-2", "checkpoint-5"]
    assert manager.latest() == tmp_path / "checkpoint-5"


def test_a_damaged_best_checkpoint_is_no_longer_the_best(tmp_path):
    manager = CheckpointManager(RunFolder(tmp_path), metric="eval_loss")
    for step, loss in ((1, 0.3), (2, 0.1), (3, 0.2)):
        _write(manager, step, eval_loss=loss)
    DAMAGE["bad JSON"](tmp_path / "checkpoint-2")
    assert manager.best() == tmp_path / "checkpoint-3"


def test_a_run_of_damaged_checkpoints_is_not_begun_again_unasked(tmp_path):
    manager = CheckpointManager(RunFolder(tmp_path))
    _write(manager, 1)
    DAMAGE["cut off"](tmp_path / "checkpoint-1")
    with raises_error("no_whole_checkpoint"):
        manager.latest()


@pytest.mark.parametrize("limit", [100, 600])  # while model.safetensors is written, and trainer_state.json
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, limit):
    manager = CheckpointManager(RunFolder(tmp_path), keep=1)
    _write(manager, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(DiskFullError) as caught, manager.writing(2, {"note": "x" * 1000}) as folder:
            save_file({"weight": torch.zeros(64)}, folder / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value).startswith(f"{tmp_path}/checkpoint-2 cannot be written: no space is left")
    assert _names(tmp_path) == ["checkpoint-1"] and manager.latest() == tmp_path / "checkpoint-1"


_ON_A_SMALL_DISK = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", sys.argv[1]], check=True)
import torch
from safetensors.torch import save_file
from rlhf_algos.checkpoints.manager import CheckpointManager
from rlhf_data import RunFolder, UserError
manager = CheckpointManager(RunFolder(sys.argv[1]), keep=2)
for step in (1, 2, 3):
    try:
        with manager.writing(step, {}) as folder:
            save_file({"weight": torch.zeros(25_000)}, folder / "model.safetensors")
    except UserError as error:
        print(error, sorted(os.listdir(sys.argv[1])), manager.latest().name, sep="\\n")
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs to mount a small file system of its own (unshare -rm)")
    command = ["unshare", "-rm", sys.executable, "-c", _ON_A_SMALL_DISK, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    # 100 kB each on 256 kB: the third one does not fit
    assert "checkpoint-3 cannot be written: no space is left on the disk" in out[0]
    assert out[1:] == ["['checkpoint-1', 'checkpoint-2']", "checkpoint-2"]


def test_going_on_from_an_earlier_step_drops_the_later_ones(tmp_path):
    manager = CheckpointManager(RunFolder(tmp_path), metric="eval_loss")
    for step, loss in ((1, 0.3), (2, 0.2), (3, 0.1)):
        _write(manager, step, eval_loss=loss)
    _write(manager, 2, eval_loss=0.25)
    assert _names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert json.loads((tmp_path / "checkpoint-2" / STATE_FILE).read_text())["best_metric"] == 0.25
