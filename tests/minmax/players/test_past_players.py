"""Past players: who is kept, and that playing leaves no trace."""

import pytest
import torch

from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_minmax.players.past_players import Member, PastPlayers, playing
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
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.1)


def snapshot(player):
    return [parameter.detach().clone() for parameter in player.parameters()]


def same(before, player):
    return all(torch.equal(a, b) for a, b in zip(before, player.parameters(), strict=True))


def logps(player):
    with torch.no_grad():
        return player.logps(BATCH).logps


def steps(past):
    return [member.step for member in past.members]


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


def test_those_kept_spread_over_the_run(players):
    policy, past = players().policy, PastPlayers()
    seen = []
    for step in range(1, 12):
        past.add(step, policy)
        seen.append(steps(past))
    # Distance between the neighbours of each member but the first and the newest; the first smallest goes.
    assert seen[5] == [1, 3, 4, 5, 6]  # of 1 2 3 4 5 6: 2 2 2 2
    assert seen[6] == [1, 3, 5, 6, 7]  # of 1 3 4 5 6 7: 3 2 2 2
    assert seen[7] == [1, 3, 5, 7, 8]  # of 1 3 5 6 7 8: 4 3 2 2
    assert seen[8] == [1, 3, 5, 7, 9]  # of 1 3 5 7 8 9: 4 4 3 2
    assert seen[9] == [1, 3, 5, 7, 10]  # of 1 3 5 7 9 10: 4 4 4 3
    assert seen[10] == [1, 5, 7, 10, 11]  # of 1 3 5 7 10 11: 4 4 5 4


def test_they_are_added_in_order(players):
    past = PastPlayers()
    past.add(3, players().policy)
    with pytest.raises(ValueError, match="not above 3"):
        past.add(3, players().policy)


def test_they_are_saved_and_taken_up_exactly(players, tmp_path):
    policy, past = players().policy, PastPlayers()
    for step in (1, 4, 9):
        move(policy, step)
        past.add(step, policy)
    past.save(tmp_path / "past", policy)
    other = PastPlayers()
    other.load(tmp_path / "past", policy)
    assert steps(other) == [1, 4, 9]
    for mine, its in zip(other.members, past.members, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters, its.parameters, strict=True))
    other.save(tmp_path / "past", policy)
    again = PastPlayers()
    again.load(tmp_path / "past", policy)
    assert steps(again) == [1, 4, 9]


def test_none_are_saved_too(players, tmp_path):
    policy = players().policy
    PastPlayers().save(tmp_path / "past", policy)
    past = PastPlayers()
    past.load(tmp_path / "past", policy)
    assert past.members == []


def test_damaged_files_are_refused_and_changes_nothing(players, tmp_path):
    policy, past = players().policy, PastPlayers()
    past.add(1, policy)
    past.save(tmp_path / "past", policy)
    (tmp_path / "past" / "model.safetensors").write_bytes(b"broken")
    with raises_error("unreadable_file"):
        past.load(tmp_path / "past", policy)
    with raises_error("unreadable_file"):
        past.load(tmp_path / "nowhere", policy)
    assert steps(past) == [1]
