"""Past players in training: when they are met, what is noted, and that nobody's weights are lost."""

import torch

from rlhf_minmax.config.schedule import PoolConfig
from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer
from rlhf_minmax.players.league import OpponentPools, Opponents
from rlhf_minmax.players.past_players import Member


def other(player, scale):
    return Member(1, tuple(torch.randn_like(p.detach().cpu()) * scale for p in player.parameters()))


def test_members_are_taken_in_and_met_by_share(game):
    pipeline, _ = game
    pools = OpponentPools(PoolConfig(every=2, share=0.25, size=4), seed=3)
    assert pools.choose(0) == Opponents(None, None)
    for step in range(1, 6):
        pools.take_in(step, pipeline.players)
    assert [member.step for member in pools.policies.members] == [2, 4]
    met = [pools.choose(step) for step in range(2000)]
    for role in ("policy", "monitor"):
        chosen = [getattr(each, role) for each in met if getattr(each, role)]
        # 2000 draws at 0.25: 500 with a standard deviation of 19.
        assert 400 < len(chosen) < 600 and {member.step for member in chosen} == {2, 4}
    assert [pools.choose(step) for step in range(2000)] == met


def test_what_each_side_made_of_it_is_noted(game):
    pipeline, _ = game
    pools = OpponentPools(PoolConfig(every=1, sampling="prioritised"), seed=0)
    pools.take_in(1, pipeline.players)
    [policy], [monitor] = pools.policies.members, pools.monitors.members
    metrics = pools.note(Opponents(policy, monitor), {"minmax/value": 0.7, "policy/judged_value": 0.2})
    # The monitor wants the value low, the policy its pay high.
    assert pools.policies._payoffs == {1: -0.7} and pools.monitors._payoffs == {1: 0.2}
    assert metrics == {"pool/size": 1.0, "pool/policy_step": 1.0, "pool/monitor_step": 1.0}
    assert pools.note(Opponents(), {"minmax/value": 9.0})["pool/policy_step"] is None
    assert pools.policies._payoffs == {1: -0.7}


def test_pools_are_saved_and_taken_up(game, tmp_path):
    pipeline, _ = game
    pools = OpponentPools(PoolConfig(every=1), seed=0)
    pools.take_in(1, pipeline.players)
    pools.save(tmp_path, pipeline.players)
    again = OpponentPools(PoolConfig(every=1), seed=0)
    again.load(tmp_path, pipeline.players)
    for a, b in ((pools.policies, again.policies), (pools.monitors, again.monitors)):
        assert [m.step for m in a.members] == [m.step for m in b.members] == [1]
        assert all(map(torch.equal, a.members[0].parameters, b.members[0].parameters))


def test_a_past_policys_answers_are_criticised_and_the_own_ones_learned_from(make_game):
    pipeline, stories = make_game()
    past = other(pipeline.players.policy, 0.3)
    before = [p.detach().clone() for p in pipeline.players.policy.parameters()]
    own = pipeline.forward_pass(stories.train[:4], seed=0)
    met = pipeline.forward_pass(stories.train[:4], seed=0, past_policy=past)
    assert [a.text for a in met.answers] == [a.text for a in own.answers]
    assert [a.text for a in met.judged[:4]] != [a.text for a in own.judged[:4]]
    assert all(map(torch.equal, before, pipeline.players.policy.parameters()))


def test_a_past_monitor_pays_the_policy(make_game, monkeypatch):
    paid = []
    for past in (False, True):
        pipeline, stories = make_game()
        output = pipeline.forward_pass(stories.train[:4], seed=0)
        optimizer = DualPPOOptimizer(pipeline, pipeline.config)
        monkeypatch.setattr(optimizer, "policy_step", lambda answers, rewards: paid.append(rewards) or {})
        torch.manual_seed(0)
        member = other(pipeline.players.monitor, 0.3) if past else None
        optimizer.step(output, seed=0, past_monitor=member)
    assert not torch.equal(*paid)


def test_a_frozen_monitor_and_a_judge_without_critiques(make_game, monkeypatch):
    pipeline, stories = make_game("training.monitor_updates_per_policy=0", "game.policy_critiques=0")
    output = pipeline.forward_pass(stories.train[:4], seed=0)
    before = [p.detach().clone() for p in pipeline.players.monitor.parameters()]
    optimizer, paid = DualPPOOptimizer(pipeline, pipeline.config), []
    monkeypatch.setattr(optimizer, "policy_step", lambda answers, rewards: paid.append(rewards) or {})
    optimizer.step(output, seed=0)
    assert all(map(torch.equal, before, pipeline.players.monitor.parameters()))
    bare = pipeline.bare_judge_scores(output.records, output.answers)
    torch.testing.assert_close(paid[0], output.rewards + pipeline.w_judge * bare)
