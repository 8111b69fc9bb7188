"""Optimizer and random state come back bit for bit."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest
import torch
from torch import nn

from raises import raises_error
from rlhf_algos.checkpoints.optimizer_state import (
    load_optimizer_state,
    load_rng_state,
    save_optimizer_state,
    save_rng_state,
)
from rlhf_algos.engine.optimizer import create_optimizer


def _parameters(shapes=((3, 2), (2,))):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _step(optimizer, times):
    for t in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach() * 0.1 * (t + 1) + 0.01
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


def test_8bit_moments_come_back_bit_for_bit(tmp_path):
    # Two parameters of 4096 entries or more: 8-bit moments that share code books; the vector keeps fp32 ones.
    straight = _parameters([(64, 64), (80, 64), (8,)])
    make = partial(create_optimizer, learning_rate=1e-2, weight_decay=0.1, optim="adamw_bnb_8bit")
    optimizer = make(straight)
    _step(optimizer, 3)
    path = tmp_path / "optimizer.safetensors"
    save_optimizer_state(optimizer, path)
    assert path.stat().st_size < 2.2 * (64 * 64 + 80 * 64) + 10_000  # two bytes per parameter, not eight
    resumed = [nn.Parameter(p.detach().clone()) for p in straight]
    other = make(resumed)
    load_optimizer_state(other, path)
    first = next(iter(other.state.values()))
    assert first["state1"].dtype == torch.uint8 and first["step"] == 3
    _step(optimizer, 3)
    _step(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


@pytest.mark.parametrize(
    ("saved", "made"), [("adamw_torch", "adamw_bnb_8bit"), ("adamw_bnb_8bit", "adamw_torch")]
)
def test_optimizer_state_of_another_kind_is_refused(tmp_path, saved, made):
    optimizer = create_optimizer(_parameters(), learning_rate=0.1, optim=saved)
    _step(optimizer, 1)
    save_optimizer_state(optimizer, tmp_path / "optimizer.safetensors")
    other = create_optimizer(_parameters(), learning_rate=0.1, optim=made)
    with raises_error("other_optimizer"):
        load_optimizer_state(other, tmp_path / "optimizer.safetensors")


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bnb_8bit"])
def test_optimizer_state_of_other_parameters_is_refused(tmp_path, optim):
    shapes = [(64, 64), (2,)]
    optimizer = create_optimizer(_parameters(shapes), learning_rate=0.1, optim=optim)
    _step(optimizer, 1)
    path = tmp_path / "optimizer.safetensors"
    save_optimizer_state(optimizer, path)
    for others in ([(64, 64)], [(64, 64), (5,)], [(64, 65), (2,)]):
        other = create_optimizer(_parameters(others), learning_rate=0.1, optim=optim)
        with raises_error("other_parameters"):
            load_optimizer_state(other, path)
    path.write_bytes(path.read_bytes()[:100])
    with raises_error("unreadable_file"):
        load_optimizer_state(optimizer, path)


def test_rng_state_comes_back(tmp_path):
    save_rng_state(tmp_path / "rng_state.safetensors")
    expected = torch.rand(3).tolist(), random.random()
    load_rng_state(tmp_path / "rng_state.safetensors")
    assert (torch.rand(3).tolist(), random.random()) == expected
    with raises_error("unreadable_file"):
        load_rng_state(tmp_path / "missing.safetensors")
