"""The aggregate a process reward model is ranked by in training is the one it scores solutions with."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from rlhf_algos.losses import StepAggregation, aggregate_steps
from rlhf_models.heads.process_reward import StepAggregate, aggregate_step_scores


@pytest.mark.parametrize("how", get_args(StepAggregation))
def test_training_ranks_solutions_as_scoring_does(how):
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0))
    trained = aggregate_steps(logits, torch.zeros(6, dtype=torch.long), how=how).squeeze()
    probability = trained.exp() if how == "product" else trained.sigmoid()
    torch.testing.assert_close(aggregate_step_scores(logits, how), probability)


def test_both_know_the_same_aggregates():
    assert get_args(StepAggregation) == get_args(StepAggregate)
