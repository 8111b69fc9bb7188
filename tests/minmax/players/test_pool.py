"""Past players: who stays in the pool, who is chosen, and that playing leaves no trace."""

import random

import pytest
import torch

from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_minmax.players.past_players import Member, OpponentPool, playing, priorities
from rlhf_minmax.players.players import load_players
from rlhf_models import DeviceManager

BATCH = pack([TokenSequence([5, 9, 14, 3, 27], 2)])[0]
FULL = ("policy_model.use_lora=false", "monitor_model.use_lora=false")
each_kind = pytest.mark.parametrize("kind", [(), FULL], ids=["lora", "full"])


@pytest.fixture
def players(make_config, tiny_model_folder):
    """Makes fresh players, from overrides as of `make_config`."""

    def make(*overrides):
        config = make_config(f"policy_model.model_name={tiny_model_folder}", *overrides)
        monitor = config.monitor_model.model_copy(update={"model_name": str(tiny_model_folder)})
        return load_players(config.model_copy(update={"monitor_model": monitor}), None, DeviceManager({}))

    return make


def move(player, seed):
    """Shift a player's parameters at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in player.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def snapshot(player):
    return [parameter.detach().clone() for parameter in player.parameters()]


def same(before, player):
    return all(torch.equal(a, b) for a, b in zip(before, player.parameters(), strict=True))


def logps(player):
    with torch.no_grad():
        return player.logps(BATCH).logps


def steps(pool):
    return [member.step for member in pool.members]


@each_kind
def test_a_member_plays_as_it_was_and_leaves_no_trace(players, kind):
    found = players(*kind)
    move(found.policy, 1)
    then, past = logps(found.policy), Member.of(1, found.policy)
    move(found.policy, 2)
    now, monitor = snapshot(found.policy), snapshot(found.monitor)
    assert not torch.equal(logps(found.policy), then)
    with playing(found.policy, past) as player:
        assert player is found.policy
        assert torch.equal(logps(player), then)
        move(player, 3)  # a member that is trained meanwhile neither stays nor changes
    assert same(now, found.policy) and same(monitor, found.monitor)
    with playing(found.policy, past):
        assert torch.equal(logps(found.policy), then)


def test_the_player_comes_back_when_something_fails(players):
    policy = players().policy
    past = Member.of(0, policy)
    move(policy, 1)
    now = snapshot(policy)
    with pytest.raises(KeyError), playing(policy, past):
        raise KeyError
    assert same(now, policy)


def test_a_member_of_another_model_is_refused(players):
    lora = ("policy_model.lora_r=4", "monitor_model.lora_r=4")
    member = Member.of(7, players(*lora).policy)
    with raises_error("other_parameters"), playing(players().policy, member):
        pass


def test_a_full_pool_spreads_over_the_history(players):
    policy, pool = players().policy, OpponentPool(4)
    seen = []
    for step in range(1, 10):
        pool.add(step, policy)
        seen.append(steps(pool))
    # Distance between the neighbours of each member but the first and the newest; the first smallest goes.
    assert seen[4] == [1, 3, 4, 5]  # of 1 2 3 4 5: 2 2 2
    assert seen[5] == [1, 3, 5, 6]  # of 1 3 4 5 6: 3 2 2
    assert seen[6] == [1, 3, 5, 7]  # of 1 3 5 6 7: 4 3 2
    assert seen[7] == [1, 3, 5, 8]  # of 1 3 5 7 8: 4 4 3
    assert seen[8] == [1, 5, 8, 9]  # of 1 3 5 8 9: 4 5 4


def test_members_are_added_in_order_to_a_pool_of_some_size(players):
    with pytest.raises(ValueError, match="at least 2"):
        OpponentPool(1)
    pool = OpponentPool(4)
    with pytest.raises(ValueError, match="empty"):
        pool.sample(random.Random(0))
    pool.add(3, players().policy)
    with pytest.raises(ValueError, match="not above 3"):
        pool.add(3, players().policy)


def test_whom_each_mode_chooses(players):
    policy = players().policy
    pools = {mode: OpponentPool(4, mode) for mode in ("latest", "uniform", "prioritised")}
    counts = {}
    for mode, pool in pools.items():
        for step in (1, 2, 3):
            pool.add(step, policy)
        for step, payoff in ((1, 5.0), (2, 5.0), (3, -1.0)):
            pool.record(step, payoff)
        rng = random.Random(0)
        drawn = [pool.sample(rng).step for _ in range(3000)]
        counts[mode] = [drawn.count(step) / 3000 for step in (1, 2, 3)]
    assert counts["latest"] == [0, 0, 1]
    # Four standard deviations of a share of 3000 draws are at most 4 · 0.5 / √3000 = 0.037.
    assert counts["uniform"] == pytest.approx([1 / 3] * 3, abs=0.037)
    weights = priorities([5.0, 5.0, -1.0])
    assert counts["prioritised"] == pytest.approx([w / sum(weights) for w in weights], abs=0.037)
    assert counts["prioritised"][2] > 0.7


def test_priorities_by_hand():
    # Mean 3, deviation √8: (3 - 5) / √8 = -0.70711 twice, 4 / √8 = 1.41421; their sigmoids are
    # 0.33024 and 0.80443, to be squared.
    assert priorities([5.0, 5.0, -1.0]) == pytest.approx([0.109059, 0.109059, 0.647109], abs=1e-5)
    assert priorities([2.0, 2.0]) == [0.25, 0.25]
    assert priorities([None, 2.0]) == [1.0, 0.25]
    assert priorities([None, None]) == [1.0, 1.0]


def test_a_harder_opponent_is_likelier():
    weights = priorities([-1.0, 0.0, 0.5, 3.0])
    assert weights == sorted(weights, reverse=True) and all(0 < weight <= 1 for weight in weights)
    assert weights == pytest.approx(priorities([10 * u + 7 for u in (-1.0, 0.0, 0.5, 3.0)]))


def test_a_pool_is_saved_and_taken_up_exactly(players, tmp_path):
    policy, pool = players().policy, OpponentPool(4, "prioritised")
    for step in (1, 4, 9):
        move(policy, step)
        pool.add(step, policy)
    pool.record(4, 1 / 3)
    pool.save(tmp_path / "pool", policy)
    other = OpponentPool(4, "prioritised")
    other.load(tmp_path / "pool", policy)
    assert steps(other) == [1, 4, 9]
    for mine, its in zip(other.members, pool.members, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters, its.parameters, strict=True))
    draws = [[p.sample(random.Random(seed)).step for seed in range(50)] for p in (pool, other)]
    assert draws[0] == draws[1]
    other.save(tmp_path / "pool", policy)
    again = OpponentPool(4)
    again.load(tmp_path / "pool", policy)
    assert steps(again) == [1, 4, 9]


def test_an_empty_pool_is_saved_too(players, tmp_path):
    policy = players().policy
    OpponentPool(4).save(tmp_path / "pool", policy)
    pool = OpponentPool(4)
    pool.load(tmp_path / "pool", policy)
    assert pool.members == ()


def test_a_damaged_pool_is_refused_and_changes_nothing(players, tmp_path):
    policy, pool = players().policy, OpponentPool(4)
    pool.add(1, policy)
    pool.save(tmp_path / "pool", policy)
    (tmp_path / "pool" / "model.safetensors").write_bytes(b"broken")
    with raises_error("unreadable_file"):
        pool.load(tmp_path / "pool", policy)
    with raises_error("unreadable_file"):
        pool.load(tmp_path / "nowhere", policy)
    assert steps(pool) == [1]
