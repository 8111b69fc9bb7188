"""MinMax as one loop on the public API: answer, criticise, score, both players' updates, dual ascent on λ.

`uv run examples/minmax_loop.py` plays the story world with the flawed reward model. The first run builds the
demonstration's models, about a minute on a CPU, and keeps them in the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import click
import torch
from torch import Tensor, nn

from rlhf_algos import create_optimizer
from rlhf_algos.advantages import group_baseline, scale_by_std
from rlhf_algos.losses import clipped_policy_loss
from rlhf_data import TokenSequence, pack
from rlhf_infer import Rollout
from rlhf_minmax import (
    DualState,
    MinMaxConfig,
    build_game,
    load_stories,
    measure_break_even,
    measure_scales,
    update_multiplier,
)
from rlhf_models import PolicyModel


def update(
    player: PolicyModel, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout], advantages: Tensor
) -> None:
    """One clipped policy-gradient step on B rollouts with advantages (B,)."""
    sequences = [TokenSequence([*r.prompt_ids, *r.completion_ids], len(r.prompt_ids)) for r in rollouts]
    [batch] = pack(sequences)  # prompts that rollouts share are computed once
    old_logps = torch.tensor([logp for rollout in rollouts for logp in rollout.logps])  # (M,) at sampling
    logps = player.logps(batch).logps  # (M,)
    token_advantages = advantages[batch.score_sequence]  # (M,)
    result = clipped_policy_loss(logps, old_logps, token_advantages, clip_low=0.2, clip_high=0.2)
    optimizer.zero_grad()
    (result.loss / len(logps)).backward()
    nn.utils.clip_grad_norm_(player.parameters(), 1.0)
    optimizer.step()


@click.command()
@click.option("--steps", default=32, show_default=True)
@click.option("--monitor-updates", default=4, show_default=True, help="of the monitor for each of the policy")
@click.option("--seed", default=0, show_default=True)
def main(steps: int, monitor_updates: int, seed: int) -> None:
    """Play the game with the demonstration's models."""
    config = MinMaxConfig(seed=seed, baseline=False)
    stories = load_stories(config)
    pipeline = build_game(config, stories).pipeline
    probe = stories.train[: config.data.probe_stories]
    pipeline, _ = measure_scales(pipeline, probe, seed=seed)
    w_judge = measure_break_even(pipeline, probe, seed=seed).w_judge
    pipeline = replace(pipeline, w_judge=w_judge)

    policy, monitor = pipeline.players.policy, pipeline.players.monitor
    rates = config.training.policy_learning_rate, config.training.monitor_learning_rate
    policy_optimizer = create_optimizer(policy.parameters(), learning_rate=rates[0])
    monitor_optimizer = create_optimizer(monitor.parameters(), learning_rate=rates[1])
    dual = DualState(config.training.constraint_penalty_lambda)
    warmup, size = config.training.num_warmup_steps(steps), config.training.batch_size

    for step in range(1, steps + 1):
        start = (step - 1) * size % len(stories.train)
        batch = stories.train[start : start + size]  # S stories
        game = pipeline.forward_pass(batch, seed=100 * step)

        # The monitor lowers the judge's score of each answer, and pays λ for verdicts that are not true.
        rewards = -w_judge * game.judge_scores - dual.multiplier * game.weighted_violation  # (C,)
        groups = torch.tensor([critique.answer for critique in game.critiques])  # (C,)
        advantages = scale_by_std(group_baseline(rewards, groups))
        for _ in range(monitor_updates):
            update(monitor, monitor_optimizer, [c.rollout for c in game.critiques], advantages)

        # λ rises while the constraint is violated: dual ascent.
        violation = float(game.weighted_violation.mean())
        dual = update_multiplier(dual, violation, config.constraint.dual_settings())

        # The policy raises reward model and judge, who reads fresh critiques of the updated monitor.
        if step > warmup:
            judged = pipeline.policy_judge_scores(batch, game.answers, seed=100 * step + 50)  # (A,)
            groups = torch.tensor([answer.story for answer in game.answers])  # (A,)
            advantages = scale_by_std(group_baseline(game.rewards + w_judge * judged, groups))
            rollouts = [answer.rollout for answer in game.answers if answer.rollout]
            update(policy, policy_optimizer, rollouts, advantages)

        right = sum(answer.correct for answer in game.answers) / len(game.answers)
        if step == 1 or step % 4 == 0:
            click.echo(
                f"step {step:3}  right {right:.2f}  violation {violation:.2f}  λ {dual.multiplier:.2f}"
            )


if __name__ == "__main__":
    main()
