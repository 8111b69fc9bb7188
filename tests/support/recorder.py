"""A step of the game whose players' optimizers only note what they are given."""

from __future__ import annotations

from typing import Any

from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer


class Recorder:
    """Takes the place of a player's optimizer and notes what it is given."""

    def __init__(self):
        self.calls = []

    def update(self, rollouts, advantages, *, updates):
        self.rollouts, self.advantages, self.updates = rollouts, advantages, updates
        self.calls.append(([r.completion_ids for r in rollouts], updates))
        return {"num_tokens": 10, "updates": updates, "kl_start": 0.25}


def recorded(make_game, *overrides):
    pipeline, stories = make_game(*overrides)
    optimizer: Any = DualPPOOptimizer(pipeline, pipeline.config)
    optimizer.monitor, optimizer.policy = Recorder(), Recorder()
    return optimizer, stories
