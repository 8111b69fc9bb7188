"""Optimizer groups and the golden values of the learning-rate schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_algos.optim import create_optimizer, create_scheduler, learning_rate_factor


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
