"""MinMax as one loop on the public API: answer, criticise, score, both players' updates, dual ascent on λ.

`uv run examples/minmax_loop.py` plays the story world with the flawed reward model. The first run builds the
demonstration's models, about a minute on a CPU, and keeps them in the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Sequence

import click
import torch
from torch import Tensor, nn

from rlhf_algos import create_optimizer
from rlhf_algos.advantages import group_baseline, scale_by_std
from rlhf_algos.losses import clipped_policy_loss, kl_k3
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

UPDATES = {"monitor": 5, "policy": 2}
"""Most updates on one batch; fewer where a player has moved by `MOST_KL` nats a token."""
MOST_KL, KL_WEIGHT = 0.05, 0.02


def train(
    player: PolicyModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    rewards: Tensor,
    group: Tensor,
    updates: int,
) -> None:
    """Clipped policy-gradient steps of one player on B rollouts with rewards (B,), each of a group (B,)."""
    advantages = scale_by_std(group_baseline(rewards, group))  # (B,)
    [batch] = pack(  # prompts that rollouts share are computed once
        [TokenSequence([*each.prompt_ids, *each.completion_ids], len(each.prompt_ids)) for each in rollouts]
    )
    order = batch.sequence_ids  # (B,) as they were packed
    old_logps = torch.tensor([logp for i in order.tolist() for logp in rollouts[i].logps])  # (M,) at sampling
    token_advantages = advantages[order][batch.score_sequence]  # (M,)
    start_logps = player.ref_logps(batch)  # (M,) of the model that the player started as
    for _ in range(updates):
        logps = player.logps(batch).logps  # (M,)
        result = clipped_policy_loss(logps, old_logps, token_advantages, clip_low=0.2, clip_high=0.2)
        if result.approx_kl / len(logps) > MOST_KL:
            break
        loss = result.loss + KL_WEIGHT * kl_k3(logps, start_logps).sum()
        optimizer.zero_grad()
        (loss / len(logps)).backward()
        nn.utils.clip_grad_norm_(player.parameters(), 1.0)
        optimizer.step()


@click.command()
@click.option("--steps", default=32, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(steps: int, seed: int) -> None:
    """Play the game with the demonstration's models."""
    config = MinMaxConfig(seed=seed, baseline=False)
    stories = load_stories(config)
    pipeline = build_game(config, stories).pipeline
    probe = stories.train[: config.data.probe_stories]
    pipeline, _ = measure_scales(pipeline, probe, seed=seed)
    w_judge = measure_break_even(pipeline, probe, seed=seed).w_judge

    policy, monitor = pipeline.players.policy, pipeline.players.monitor
    policy_optimizer = create_optimizer(policy.parameters(), learning_rate=3e-3)
    monitor_optimizer = create_optimizer(monitor.parameters(), learning_rate=3e-3)
    dual = DualState(config.training.constraint_penalty_lambda)
    warmup, size = config.training.num_warmup_steps(steps), config.training.batch_size

    for step in range(1, steps + 1):
        start = (step - 1) * size % len(stories.train)
        batch = stories.train[start : start + size]  # S stories
        game = pipeline.forward_pass(batch, seed=100 * step)

        # The monitor lowers the judge's score of each answer, and pays λ for verdicts that are not true.
        rewards = -w_judge * game.judge_scores - dual.multiplier * game.weighted_violation  # (C,)
        group = torch.tensor([critique.answer for critique in game.critiques])  # (C,)
        rollouts = [critique.rollout for critique in game.critiques]
        train(monitor, monitor_optimizer, rollouts, rewards, group, UPDATES["monitor"])

        # λ rises while the constraint is violated: dual ascent.
        violation = float(game.weighted_violation.mean())
        dual = update_multiplier(dual, violation, config.constraint.dual_settings())

        # The policy raises reward model and judge, who reads fresh critiques of the updated monitor.
        if step > warmup:
            judged = pipeline.policy_judge_scores(batch, game.answers, seed=100 * step + 50)  # (A,)
            group = torch.tensor([answer.story for answer in game.answers])  # (A,)
            rollouts = [answer.rollout for answer in game.answers if answer.rollout]
            rewards = game.rewards + w_judge * judged
            train(policy, policy_optimizer, rollouts, rewards, group, UPDATES["policy"])

        right = sum(bool(answer.correct) for answer in game.answers) / len(game.answers)
        if step == 1 or step % 4 == 0:
            click.echo(
                f"step {step:3}  right {right:.2f}  violation {violation:.2f}  λ {dual.multiplier:.2f}"
            )


if __name__ == "__main__":
    main()
