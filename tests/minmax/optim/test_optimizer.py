"""Two time scales: whose parameters move, in which direction, by how much, and when updates stop."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from proofs import by_default
from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_infer import Rollout
from rlhf_minmax.formats import Critique
from rlhf_minmax.game.forward_pass import Answer, CritiqueSample, MinMaxOutput
from rlhf_minmax.game.rates import critique_rates
from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer
from rlhf_minmax.optim.player import PlayerOptimizer

FULL = ("policy_model.use_lora=false", "monitor_model.use_lora=false")
each_kind = pytest.mark.parametrize("kind", [(), FULL], ids=["lora", "full"])
lora_by_default = pytest.mark.parametrize("kind", by_default([(), FULL], ()), ids=["lora", "full"])


def snapshot(player):
    return [parameter.detach().clone() for parameter in player.parameters()]


def same(before, player):
    return all(torch.equal(a, b) for a, b in zip(before, player.parameters(), strict=True))


def sampled(pipeline, stories, count=4):
    """Rollouts of the policy on some stories, N = 3 each."""
    answers = pipeline.answer(pipeline.players.policy, stories.train[:count], 3, seed=0)
    return [answer.rollout for answer in answers]


def logps(player, rollouts):
    """Sum of the completion's log-probs of each rollout."""
    sequences = [TokenSequence([*r.prompt_ids, *r.completion_ids], len(r.prompt_ids)) for r in rollouts]
    (batch,) = pack(sequences)
    with torch.no_grad():
        found = player.logps(batch).logps
    return torch.zeros(len(rollouts)).index_add(0, batch.sequence_ids[batch.score_sequence], found)


def player_optimizer(pipeline, **changes):
    config = pipeline.config
    settings: dict[str, Any] = {"learning_rate": 3e-3} | changes
    return PlayerOptimizer(pipeline.players.policy, config.policy_model, config, **settings)


@each_kind
def test_a_rewarded_completion_gets_likelier_and_a_punished_one_less_likely(make_game, kind):
    pipeline, stories = make_game("game.target_kl=10", *kind)
    rollouts = sampled(pipeline, stories)
    distinct = {tuple(r.completion_ids): r for r in rollouts}
    good, bad = list(distinct.values())[:2]
    before = logps(pipeline.players.policy, [good, bad])
    optimizer = player_optimizer(pipeline, learning_rate=1e-3)
    metrics = optimizer.update([good, bad], torch.tensor([1.0, -1.0]), updates=3)
    after = logps(pipeline.players.policy, [good, bad])
    assert metrics["updates"] == 3
    assert after[0] > before[0] and after[1] < before[1]


def test_metrics_of_the_first_gradient(make_game):
    pipeline, stories = make_game()
    rollouts = sampled(pipeline, stories)
    advantages = torch.linspace(-1, 1, len(rollouts))
    tokens = torch.tensor([len(r.completion_ids) for r in rollouts])
    metrics = player_optimizer(pipeline).update(rollouts, advantages, updates=1)
    # At the sampling policy, which is the reference too, ratios are 1 and both KLs 0: the loss is minus the
    # mean advantage over tokens.
    assert metrics["loss"] == pytest.approx(-float((advantages * tokens).sum() / tokens.sum()), abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0 and metrics["entropy"] > 0 and metrics["grad_norm"] > 0


def test_cutting_by_tokens_changes_nothing(make_game):
    gradients, metrics = [], []
    for budget in (100_000, 40):
        pipeline, stories = make_game(f"training.max_tokens_per_batch={budget}", "game.target_kl=100")
        rollouts = sampled(pipeline, stories)
        optimizer = player_optimizer(pipeline)
        seen = []
        optimizer.stepper.optimizer.register_step_pre_hook(
            lambda *_, o=optimizer, s=seen: s.append(
                [p.grad.clone() for p in o.parameters if p.grad is not None]
            )
        )
        metrics.append(optimizer.update(rollouts, torch.linspace(-1, 2, len(rollouts)), updates=2))
        gradients.append(seen)
    assert metrics[0].pop("num_tokens") < metrics[1].pop("num_tokens")
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5)
    for whole, cut in zip(*gradients, strict=True):
        largest = max(float(gradient.abs().max()) for gradient in whole)
        for a, b in zip(whole, cut, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * largest)


@pytest.mark.slow
@each_kind
def test_the_kl_stop_ends_the_updates(make_game, kind):
    moved = []
    for updates, target in ((5, 1e-6), (1, 1e-6), (5, 100.0)):
        pipeline, stories = make_game(f"game.target_kl={target}", *kind)
        rollouts = sampled(pipeline, stories)
        optimizer = player_optimizer(pipeline)
        metrics = optimizer.update(rollouts, torch.linspace(-1, 2, len(rollouts)), updates=updates)
        moved.append((metrics, snapshot(pipeline.players.policy)))
        assert all(parameter.grad is None for parameter in optimizer.parameters)
    (stopped, after_stop), (single, after_single), (free, after_free) = moved
    assert stopped["updates"] == single["updates"] == 1 and free["updates"] == 5
    assert stopped["approx_kl"] > 1e-6
    assert free["num_tokens"] == 5 * stopped["num_tokens"]
    assert all(torch.equal(a, b) for a, b in zip(after_stop, after_single, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(after_stop, after_free, strict=True))


def test_the_kl_to_the_reference_holds_the_player_back(make_game):
    distance = []
    for beta in (0.0, 5.0):
        pipeline, stories = make_game(f"game.beta={beta}", "game.target_kl=100")
        rollouts = sampled(pipeline, stories)
        metrics = player_optimizer(pipeline).update(
            rollouts, torch.linspace(-1, 2, len(rollouts)), updates=12
        )
        distance.append(metrics["kl"])
    assert 0 < distance[1] < 0.5 * distance[0]


@lora_by_default
def test_the_reference_stays_what_the_player_was(make_game, kind):
    pipeline, stories = make_game(*kind)
    policy, rollouts = pipeline.players.policy, sampled(pipeline, stories)
    (batch,) = pack([TokenSequence([*r.prompt_ids, *r.completion_ids], 1) for r in rollouts[:1]])
    start = policy.logps(batch).logps.detach()
    player_optimizer(pipeline).update(rollouts, torch.linspace(-1, 2, len(rollouts)), updates=2)
    torch.testing.assert_close(policy.ref_logps(batch), start, rtol=0, atol=1e-5)
    assert not torch.allclose(policy.logps(batch).logps, start, atol=1e-3)


def test_a_loss_that_is_not_finite_is_refused_and_changes_nothing(make_game):
    pipeline, stories = make_game()
    rollouts, before = sampled(pipeline, stories), snapshot(pipeline.players.policy)
    with raises_error("non_finite_loss"):
        player_optimizer(pipeline).update(rollouts, torch.full((len(rollouts),), torch.inf), updates=2)
    assert same(before, pipeline.players.policy)
    assert not pipeline.players.policy.model.training


@lora_by_default
def test_each_step_moves_one_player_only(make_game, kind):
    pipeline, stories = make_game(*kind)
    policy, monitor, plain = pipeline.players.policy, pipeline.players.monitor, pipeline.players.plain
    output = pipeline.forward_pass(stories.train[:4], seed=0)
    optimizer = DualPPOOptimizer(pipeline, pipeline.config)
    start = {name: snapshot(p) for name, p in (("policy", policy), ("monitor", monitor), ("plain", plain))}
    optimizer.monitor_step(output)
    assert same(start["policy"], policy) and same(start["plain"], plain)
    assert not same(start["monitor"], monitor)
    critic = snapshot(monitor)
    optimizer.policy_step(output.answers, torch.randn(12, generator=torch.Generator().manual_seed(0)))
    assert same(critic, monitor) and same(start["plain"], plain)
    assert not same(start["policy"], policy)


class Recorder:
    """Takes the place of a player's optimizer and notes what it is given."""

    def update(self, rollouts, advantages, *, updates):
        self.rollouts, self.advantages, self.updates = rollouts, advantages, updates
        return {"num_tokens": 0}


def critique(answer, parsed=True):
    said = Critique("a b", "right", None) if parsed else None
    return CritiqueSample(answer, "", said, parsed, parsed, 1.0, Rollout([1], [2], [0.0], "stop"))


def made_output(**changes):
    """Two answers with two critiques each; the third critique is unparsable."""
    fields = {
        "records": [],
        "answers": [],
        "rewards": torch.zeros(2),
        "judged": [],
        "judged_rewards": torch.zeros(2),
        "critiques": [critique(0), critique(0), critique(1, parsed=False), critique(1)],
        "judge_scores": torch.tensor([1.0, 0.0, 0.0, 0.0]),
        "combined": torch.zeros(4),
        "labels": torch.ones(4, dtype=torch.bool),
        "known": torch.ones(4, dtype=torch.bool),
        "violation": torch.zeros(4),
        "weighted_violation": torch.tensor([0.0, 1.0, 0.0, 0.0]),
    }
    return MinMaxOutput(**(fields | changes))


def recorded(make_game, *overrides):
    pipeline, _ = make_game(*overrides)
    optimizer: Any = DualPPOOptimizer(pipeline, pipeline.config)
    optimizer.monitor, optimizer.policy = Recorder(), Recorder()
    return optimizer


def test_the_monitors_advantages_by_hand(make_game):
    optimizer = recorded(
        make_game, "training.constraint_penalty_lambda=2", "game.unparsable_critique_penalty=2"
    )
    metrics = optimizer.monitor_step(made_output())
    # w_judge = 1: -J - 2v - 2[unparsable] = -1, -2 | -2, 0; minus each answer's mean, -1.5 | -1:
    # 0.5, -0.5, -1, 1; over the batch's deviation √(2.5 / 3) = 0.912871.
    expected = torch.tensor([0.547723, -0.547723, -1.095445, 1.095445])
    torch.testing.assert_close(optimizer.monitor.advantages, expected, rtol=0, atol=1e-5)
    assert optimizer.monitor.updates == 5
    assert metrics["monitor/frac_groups_zero_std"] == 0
    # Within answers 2v is -1, 1 | 0, 0 and J 0.5, -0.5 | 0, 0.
    assert metrics["monitor/truth_to_judge_spread"] == pytest.approx(2.0)


def test_a_probe_of_a_frozen_monitor_makes_one_update(make_game):
    optimizer = recorded(make_game, "training.monitor_updates_per_policy=0")
    optimizer.monitor_step(made_output())
    assert optimizer.monitor.updates == 1


def test_the_reward_models_score_cancels_in_the_monitors_baseline(make_game):
    optimizer = recorded(make_game)
    optimizer.monitor_step(made_output())
    before = optimizer.monitor.advantages
    optimizer.monitor_step(
        made_output(rewards=torch.full((2,), 50.0), judged_rewards=torch.tensor([9.0, -9.0]))
    )
    assert torch.equal(optimizer.monitor.advantages, before)


def test_a_constant_on_the_reward_model_leaves_the_monitors_whole_pass_alone(make_game):
    pipeline, stories = make_game()

    class Lifted:
        def score(self, prompts, completions, *, max_tokens=None):
            return pipeline.reward_model.score(prompts, completions, max_tokens=max_tokens) + 10

    advantages = []
    for each in (pipeline, replace(pipeline, reward_model=Lifted())):
        optimizer: Any = DualPPOOptimizer(each, each.config)
        optimizer.monitor = Recorder()
        output = each.forward_pass(stories.train[:4], seed=0)
        optimizer.monitor_step(output)
        advantages.append((output.combined, optimizer.monitor.advantages))
    torch.testing.assert_close(advantages[1][0], advantages[0][0] + 10)
    assert torch.equal(advantages[0][1], advantages[1][1])
    assert advantages[0][1].any()


def test_groups_without_spread_are_counted(make_game):
    optimizer = recorded(make_game)
    calm = made_output(judge_scores=torch.zeros(4), weighted_violation=torch.zeros(4))
    # Answer 0: equal rewards; answer 1: one of the two is unparsable.
    assert optimizer.monitor_step(calm)["monitor/frac_groups_zero_std"] == 0.5


def test_the_policys_advantages_by_hand(make_game):
    optimizer = recorded(make_game, "game.unparsable_answer_penalty=3")
    rollout = Rollout([1], [2], [0.0], "stop")
    claims = [(0, "a"), (0, None), (1, "a"), (1, "b")]
    answers = [Answer(story, "", claim, False, None, rollout) for story, claim in claims]
    optimizer.policy_step(answers, torch.tensor([1.0, 2.0, 0.0, 4.0]))
    # With the penalty 1, -1 | 0, 4; minus each story's mean 0 | 2: 1, -1, -2, 2; deviation √(10 / 3).
    expected = torch.tensor([1.0, -1.0, -2.0, 2.0]) / (10 / 3) ** 0.5
    torch.testing.assert_close(optimizer.policy.advantages, expected)
    assert optimizer.policy.updates == 2


def test_the_policy_is_paid_by_the_updated_monitor(make_game, monkeypatch):
    pipeline, stories = make_game("game.w_reward=2", "game.policy_critiques=2")
    pipeline = replace(pipeline, w_judge=3.0)
    output = pipeline.forward_pass(stories.train[:4], seed=0)
    optimizer: Any = DualPPOOptimizer(pipeline, pipeline.config)
    order = []
    optimizer.monitor, optimizer.policy = Recorder(), Recorder()
    monkeypatch.setattr(Recorder, "update", lambda *_, **__: order.append("update") or {"num_tokens": 0})
    fresh = pipeline.criticise(stories.train[:4], output.answers, 2, seed=9 + 2)
    mean = pipeline.judge_scores(stories.train[:4], output.answers, fresh).view(-1, 2).mean(1)
    criticise = type(pipeline).criticise
    monkeypatch.setattr(
        type(pipeline), "criticise", lambda *a, **k: order.append("criticise") or criticise(*a, **k)
    )
    paid = []
    monkeypatch.setattr(optimizer, "policy_step", lambda answers, rewards: paid.append(rewards) or {})
    metrics = optimizer.step(output, seed=9)
    assert order == ["update", "criticise"]
    torch.testing.assert_close(paid[0], 2 * output.rewards + 3 * mean)
    assert metrics["policy/judged_value"] == pytest.approx(float(paid[0].mean()), abs=1e-6)
    spreads = [part.view(4, 3).var(1).sum().sqrt() for part in (2 * output.rewards, 3 * mean)]
    assert metrics["policy/reward_to_judge_spread"] == pytest.approx(float(spreads[0] / spreads[1]))


def test_the_warm_up_leaves_the_policy_alone(make_game):
    pipeline, stories = make_game()
    output, before = pipeline.forward_pass(stories.train[:4], seed=0), snapshot(pipeline.players.policy)
    metrics = DualPPOOptimizer(pipeline, pipeline.config).step(output, seed=0, policy_learns=False)
    assert same(before, pipeline.players.policy)
    assert not any(name.startswith("policy/") for name in metrics)
    assert metrics["constraint/violation"] == pytest.approx(float(output.weighted_violation.mean()))


def test_learning_rates_and_their_ratio_by_hand(make_game):
    pipeline, _ = make_game(
        "training.policy_learning_rate=0.001",
        "training.monitor_learning_rate=0.004",
        "policy_model.warmup_steps=2",
        "monitor_model.lr_scheduler_type=linear",
    )
    optimizer = DualPPOOptimizer(pipeline, pipeline.config, total_steps=4)
    names = ("policy/learning_rate", "monitor/learning_rate", "dynamics/lr_ratio")
    found = [[optimizer.begin_step(step).get(name) for name in names] for step in (0, 2, 3)]
    # The policy warms up from step 1 on: 0, 1/2, 1; the monitor's falls: 1, 1/2, 1/4. There is no ratio to 0.
    assert found == [
        [0.0, 0.004, None],
        pytest.approx([0.0005, 0.002, 4.0]),
        pytest.approx([0.001, 0.001, 1]),
    ]
    assert optimizer.monitor is not None
    rates = [each.stepper.optimizer.param_groups[0]["lr"] for each in (optimizer.policy, optimizer.monitor)]
    assert rates == pytest.approx([0.001, 0.001])


def test_dual_ascent_starts_at_the_initial_multiplier(make_game):
    optimizer = recorded(make_game, "constraint.rule=pid", "training.constraint_penalty_lambda=3")
    metrics = optimizer.dual_step(optimizer.config.constraint.threshold)
    assert metrics["dual/lambda"] == pytest.approx(3.0)
    assert metrics["dual/saturated"] == 0
    assert metrics["constraint/violation_ema"] == metrics["constraint/violation"]
    assert optimizer.dual_step(0.9)["dual/lambda"] > 3.0


def test_states_are_saved_and_taken_up(make_game, tmp_path):
    pipeline, stories = make_game()
    optimizer: Any = DualPPOOptimizer(pipeline, pipeline.config)
    optimizer.step(pipeline.forward_pass(stories.train[:4], seed=0), seed=0)
    dual = optimizer.save(tmp_path)
    other: Any = DualPPOOptimizer(pipeline, pipeline.config)
    other.load(tmp_path, dual)
    assert other.dual == optimizer.dual
    for mine, its in ((other.policy, optimizer.policy), (other.monitor, optimizer.monitor)):
        for a, b in zip(mine.parameters, its.parameters, strict=True):
            assert mine.stepper.optimizer.state[a].keys() == its.stepper.optimizer.state[b].keys()
            for key, value in its.stepper.optimizer.state[b].items():
                assert torch.equal(mine.stepper.optimizer.state[a][key], value)


def test_rates_of_critiques():
    cut = Rollout([1], [2], [0.0], "length")
    rows = [
        critique(0),
        critique(0),
        replace(critique(0), evidence_valid=False),
        replace(critique(0, parsed=False), rollout=cut),
    ]
    assert critique_rates(rows) == {
        "monitor/parse_rate": 0.75,
        "monitor/evidence_valid_rate": 0.5,
        "monitor/truncated_rate": 0.25,
    }
