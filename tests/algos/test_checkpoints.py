"""Checkpoints: whole or absent, exact, rolling, nothing pickled."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

from rlhf_algos.checkpoints import (
    STATE_FILE,
    CheckpointManager,
    load_optimizer_state,
    load_rng_state,
    save_optimizer_state,
    save_rng_state,
)
from rlhf_data import RunFolder, UserError


def _parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 2), (2,)]]


def _step(optimizer, times):
    for t in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.1 * (t + 1))
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), 3),
        (lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 0.1}], amsgrad=True), 2),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 2),
        (lambda p: torch.optim.AdamW(p), 0),
    ],
)
def test_optimizer_state_comes_back_bit_for_bit(make, steps, tmp_path):
    straight = _parameters()
    optimizer = make(straight)
    _step(optimizer, steps)
    save_optimizer_state(optimizer, tmp_path / "optimizer.safetensors")
    resumed = [nn.Parameter(p.detach().clone()) for p in straight]
    other = make(resumed)
    load_optimizer_state(other, tmp_path / "optimizer.safetensors")
    assert other.state_dict()["param_groups"] == json.loads(
        json.dumps(optimizer.state_dict()["param_groups"])
    )
    _step(optimizer, 3)
    _step(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_optimizer_state_of_other_parameters_is_refused(tmp_path):
    optimizer = torch.optim.AdamW(_parameters())
    _step(optimizer, 1)
    path = tmp_path / "optimizer.safetensors"
    save_optimizer_state(optimizer, path)
    for shapes in ([(3, 2)], [(3, 2), (5,)]):
        other = torch.optim.AdamW([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        with pytest.raises(UserError, match="other parameters"):
            load_optimizer_state(other, path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"optimizer\.safetensors cannot be read"):
        load_optimizer_state(optimizer, path)


def test_rng_state_comes_back(tmp_path):
    save_rng_state(tmp_path / "rng_state.safetensors")
    expected = torch.rand(3).tolist(), random.random()
    load_rng_state(tmp_path / "rng_state.safetensors")
    assert (torch.rand(3).tolist(), random.random()) == expected
    with pytest.raises(UserError, match="cannot be read"):
        load_rng_state(tmp_path / "missing.safetensors")


def test_checkpoints_roll_and_the_latest_is_found(tmp_path):
    manager = CheckpointManager(RunFolder(tmp_path), keep=2)
    assert manager.latest() is None
    for step in (2, 4, 10):
        with manager.writing(step, {"note": f"step {step}"}) as folder:
            (folder / "model.txt").write_text("weights")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-4"]
    latest = manager.latest()
    assert latest is not None
    assert manager.read_state(latest) == {"step": 10, "note": "step 10"}


def test_state_is_written_last_and_a_failure_leaves_nothing(tmp_path):
    manager = CheckpointManager(RunFolder(tmp_path))
    with pytest.raises(OSError, match="disk full"), manager.writing(1, {}) as folder:
        assert not (folder / STATE_FILE).exists()
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_incomplete_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a complete checkpoint"):
        CheckpointManager.read_state(tmp_path)
