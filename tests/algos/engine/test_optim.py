"""Optimizer groups and the golden values of the learning-rate schedules."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from raises import raises_error
from rlhf_algos import METHODS, check_start, plan_machine
from rlhf_algos.configs.trainer import TrainerConfig
from rlhf_algos.engine.optimizer import OPTIMIZERS, create_optimizer, create_scheduler, learning_rate_factor


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        # 2 warm-up steps (0, 1/2), then p = 0, 1/4, 1/2, 3/4, 1 over the 4 that are left
        ("constant", [0, 0.5, 1, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25, 0]),
        # (1 + cos(pi p)) / 2: 1, (1 + 1/sqrt 2) / 2, 1/2, (1 - 1/sqrt 2) / 2, 0
        ("cosine", [0, 0.5, 1, 0.8535534, 0.5, 0.1464466, 0]),
    ],
)
def test_schedule_golden(schedule, factors):
    seen = [learning_rate_factor(step, schedule=schedule, total_steps=6, warmup_steps=2) for step in range(7)]
    assert seen == pytest.approx(factors, abs=1e-7)


def test_unknown_schedule_names_the_known_ones():
    with pytest.raises(ValueError, match="constant, linear or cosine, got 'step'"):
        learning_rate_factor(0, schedule="step", total_steps=1, warmup_steps=0)


def test_scheduler_drives_the_optimizer_and_reads_fractions():
    optimizer = create_optimizer([nn.Parameter(torch.zeros(2))], learning_rate=0.1)
    scheduler = create_scheduler(optimizer, "linear", total_steps=10, warmup_steps=0.15)  # 1.5 -> 2 steps
    rates = []
    for _ in range(3):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0, 0.05, 0.1])


def test_weight_decay_spares_vectors():
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = create_optimizer([vector, matrix], learning_rate=0.1, weight_decay=0.5)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()  # no gradient: only w <- w (1 - lr decay) = 0.95
    assert matrix.tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert vector.tolist() == [1, 1]


def test_frozen_parameters_are_refused():
    with pytest.raises(ValueError, match="1 of the 1 parameters"):
        create_optimizer([nn.Parameter(torch.zeros(1), requires_grad=False)], learning_rate=0.1)
    with pytest.raises(ValueError, match="0 of the 0 parameters"):
        create_optimizer([], learning_rate=0.1)


def test_8bit_adamw_follows_adamw():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 64, generator=generator)
    gradients = [torch.randn(64, 64, generator=generator) for _ in range(3)]
    moved = {}
    for optim in ("adamw_torch", "adamw_bnb_8bit"):
        matrix = nn.Parameter(start.clone())
        optimizer = create_optimizer([matrix], learning_rate=0.1, weight_decay=0.1, epsilon=0.5, optim=optim)
        for gradient in gradients:
            matrix.grad = gradient.clone()
            optimizer.step()
        moved[optim] = matrix.detach() - start
    assert optimizer.state[matrix]["state1"].dtype == torch.uint8
    difference = (moved["adamw_torch"] - moved["adamw_bnb_8bit"]).abs().mean()
    assert difference < 0.02 * moved["adamw_torch"].abs().mean()


def test_epsilon_and_betas_are_those_asked_for():
    vector = nn.Parameter(torch.zeros(1))
    optimizer = create_optimizer([vector], learning_rate=0.1, betas=(0.5, 0.5), epsilon=1.0)
    vector.grad = torch.ones(1)
    optimizer.step()
    # Bias-corrected moments of the first step are the gradient and its square: -lr * 1 / (sqrt(1) + 1)
    assert vector.tolist() == pytest.approx([-0.05])


def test_unknown_optimizer_names_the_known_ones():
    with pytest.raises(ValueError, match=r"optim must be adamw_torch or .* or paged_adamw_32bit, got 'sgd'"):
        create_optimizer([nn.Parameter(torch.zeros(1))], learning_rate=0.1, optim="sgd")


def test_missing_bitsandbytes_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises_error("missing_package"):
        create_optimizer([nn.Parameter(torch.zeros(1))], learning_rate=0.1, optim="adamw_bnb_8bit")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to page from")
@pytest.mark.parametrize("optim", ["paged_adamw_8bit", "paged_adamw_32bit"])
def test_pages_need_a_gpu(optim: str) -> None:
    with raises_error("missing_gpu"):
        create_optimizer([nn.Parameter(torch.zeros(1))], learning_rate=0.1, optim=optim)
    job = METHODS["sft"].resolve({"optim": optim})
    with raises_error("missing_gpu"):
        check_start(METHODS["sft"], job)
    check_start(METHODS["sft"], job, plan_machine(1, "H100"))


def test_the_config_names_the_same_optimizers():
    assert get_args(TrainerConfig.model_fields["optim"].annotation) == tuple(OPTIMIZERS)
