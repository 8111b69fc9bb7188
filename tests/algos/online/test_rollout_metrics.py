"""Metrics of a step's rewards."""

from __future__ import annotations

import torch

from rlhf_algos.online.rollouts import StepTable, rollout_metrics


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    rewards = torch.tensor([0.3, 0.3 + 1e-8, 0.1, 0.1 * (1 + 2e-7), 0.2, 0.9])
    table = StepTable(("one",), rewards[None], rewards, torch.tensor([[4.0, 0.0, 1.0]]).repeat(6, 1).T, 2)
    assert rollout_metrics(table)["frac_reward_zero_std"] == torch.tensor(2 / 3).item()
