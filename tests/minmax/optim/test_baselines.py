"""Baselines and critics of the players, the KL's multiplier, and gates."""

import copy

import pytest
import torch

from rlhf_data import TokenSequence, pack
from rlhf_infer import Rollout
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer
from rlhf_minmax.optim.player import PlayerOptimizer, sequence_advantages
from rlhf_models import PolicyModel


# Rewards 1, 3 | 5, 7, 9. group: -1, 1 | -2, 0, 2. leave_one_out: 1 - 3, 3 - 1 | 5 - 8, 7 - 7, 9 - 6.
# batch, mean 5: -4, -2, 0, 2, 4. Each over its deviation, of n - 1: √(10/4), √(26/4), √(40/4).
@pytest.mark.parametrize(
    ("baseline", "centred", "variance"),
    [
        ("group", [-1, 1, -2, 0, 2], 2.5),
        ("leave_one_out", [-2, 2, -3, 0, 3], 6.5),
        ("batch", [-4, -2, 0, 2, 4], 10.0),
        ("critic", [1, 3, 5, 7, 9], 1.0),
    ],
)
def test_baselines_by_hand(baseline, centred, variance):
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0]), torch.tensor([0, 0, 1, 1, 1])
    expected = torch.tensor(centred) / variance**0.5
    torch.testing.assert_close(sequence_advantages(rewards, groups, baseline), expected)


@pytest.fixture
def make_player(tiny_llama, byte_tokenizer):
    """Makes a `PlayerOptimizer` of a fresh tiny model, from settings of the player."""

    def make(**settings):
        fields = {"policy_model": settings, "game": {"target_kl": 100.0}}
        config = MinMaxConfig.from_dict(fields)
        reference = copy.deepcopy(tiny_llama).requires_grad_(False)
        player = PolicyModel(copy.deepcopy(tiny_llama), byte_tokenizer, reference=reference)
        return PlayerOptimizer(player, config.policy_model, config, learning_rate=3e-3)

    return make


def logps(player, completions):
    """Log-probs of the tokens of completions of one prompt, a list for each."""
    sequences = [TokenSequence([5, 6, *tokens], 2) for tokens in completions]
    (batch,) = pack(sequences)
    with torch.no_grad():
        found = player.logps(batch).logps
    members = batch.sequence_ids[batch.score_sequence].tolist()
    rows = [[] for _ in completions]
    for member, logp in zip(members, found.tolist(), strict=True):
        rows[member].append(logp)
    return rows


COMPLETIONS = [[7, 8], [9], [10, 11, 12], [9, 8]]


@pytest.mark.parametrize("baseline", ["leave_one_out", "batch", "critic"])
def test_a_rewarded_completion_gets_likelier_under_every_baseline(make_player, baseline):
    optimizer = make_player(baseline=baseline)
    before = logps(optimizer.player, COMPLETIONS)
    rewards = torch.tensor([3.0, 0.0, -3.0, 0.0])
    for _ in range(4):
        rows = logps(optimizer.player, COMPLETIONS)
        rollouts = [Rollout([5, 6], t, own, "stop") for t, own in zip(COMPLETIONS, rows, strict=True)]
        advantages = sequence_advantages(rewards, torch.zeros(4, dtype=torch.long), baseline)
        optimizer.update(rollouts, advantages, updates=2)
    after = logps(optimizer.player, COMPLETIONS)
    gain = [sum(now) - sum(then) for now, then in zip(after, before, strict=True)]
    assert gain[0] > 0 > gain[2]
    assert gain[0] > max(gain[1:])


def test_advantages_over_a_critic_by_hand(make_player, monkeypatch):
    optimizer = make_player(baseline="critic", lam=0.5)
    monkeypatch.setattr(optimizer.stepper, "scores", lambda _: (None, torch.tensor([1.0, 2.0, 0.0])))
    rollouts = [Rollout([5, 6], tokens, [0.0] * len(tokens), "stop") for tokens in ([7, 8], [9])]
    (part,) = optimizer._prepare(rollouts, torch.tensor([3.0, -1.0]))
    # δ = 2 - 1, 3 - 2 | -1 - 0: A = 1 + 0.5, 1 | -1, of mean 0.5 and variance 3.5 / 2; returns are A + V.
    expected = torch.tensor([1.0, 0.5, -1.5]) / 1.75**0.5
    torch.testing.assert_close(part.advantages, expected)
    torch.testing.assert_close(part.returns, torch.tensor([2.5, 3.0, -1.0]))


def test_one_token_over_a_critic_has_no_advantage(make_player):
    optimizer = make_player(baseline="critic")
    (part,) = optimizer._prepare([Rollout([5, 6], [7], [0.0], "stop")], torch.tensor([3.0]))
    assert part.advantages.tolist() == [0.0]  # a single value equals the mean


def test_a_critic_learns_what_completions_are_worth(make_player):
    optimizer = make_player(baseline="critic", vf_coef=1.0)
    rows = logps(optimizer.player, COMPLETIONS)
    rollouts = [Rollout([5, 6], t, own, "stop") for t, own in zip(COMPLETIONS, rows, strict=True)]
    losses = [optimizer.update(rollouts, torch.full((4,), 2.0), updates=1)["value_loss"] for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]
    assert all(later < earlier for earlier, later in zip(losses[::10], losses[10::10], strict=False))
    assert "value_loss" not in make_player().update(rollouts, torch.ones(4), updates=1)


def test_a_monitor_stands_still_after_its_steps(make_game):
    pipeline, stories = make_game("training.monitor_steps=2")
    optimizer = DualPPOOptimizer(pipeline, pipeline.config, total_steps=3)
    output, monitor = pipeline.forward_pass(stories.train[:4], seed=0), pipeline.players.monitor
    learned = []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in monitor.parameters()]
        optimizer.begin_step(step)
        metrics = optimizer.step(output, seed=step)
        moved = [not torch.equal(a, b) for a, b in zip(before, monitor.parameters(), strict=True)]
        learned.append((any(moved), "monitor/updates" in metrics))
    assert learned == [(True, True), (True, True), (False, False)]
    assert optimizer.dual.updates == 3  # λ moves all the same
