"""Whose turn it is: the adaptive rule by hand, gates, warm-up, and gates that leave no room."""

import pytest

from rlhf_data import UserError
from rlhf_minmax.config.schedule import ScheduleConfig, Turn, next_turn, smoothed


def turn(accuracy, *, updates=5, in_warmup=False, **settings):
    return next_turn(ScheduleConfig(**settings), accuracy, monitor_updates=updates, in_warmup=in_warmup)


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9, 1.0])
def test_a_fixed_schedule_does_not_look(accuracy):
    assert turn(accuracy) == Turn(5, policy_learns=True)
    assert next_turn(ScheduleConfig(), accuracy, monitor_updates=5) == Turn(5, policy_learns=True)


@pytest.mark.parametrize(
    ("accuracy", "updates"),
    # k = 4, target 0.8: 4 · (1 - a) / 0.2, rounded, within 1 and 10.
    [(0.8, 4), (0.6, 8), (0.7, 6), (0.9, 2), (0.97, 1), (1.0, 1), (0.53, 9), (0.5, 10), (0.0, 10)],
)
def test_an_adaptive_schedule_trains_the_losing_monitor_more(accuracy, updates):
    found = turn(accuracy, updates=4, rule="adaptive", monitor_target=0.8)
    assert found == Turn(updates, policy_learns=True)


def test_the_most_updates_are_a_setting():
    assert turn(0.5, rule="adaptive", max_monitor_updates=7).monitor_updates == 7


def test_a_monitor_that_is_never_trained_stays_so():
    assert turn(0.5, updates=0, rule="adaptive").monitor_updates == 0


@pytest.mark.parametrize(
    ("accuracy", "monitor", "policy"),
    [(0.55, 5, False), (0.6, 5, True), (0.8, 5, True), (0.95, 5, True), (0.96, 0, True)],
)
def test_gates_stop_the_player_that_is_ahead(accuracy, monitor, policy):
    found = turn(accuracy, freeze_monitor_above=0.95, freeze_policy_below=0.6)
    assert found == Turn(monitor, policy_learns=policy)


def test_gates_come_after_the_adaptive_rule():
    gated = {"rule": "adaptive", "freeze_monitor_above": 0.95}
    assert turn(0.96, **gated).monitor_updates == 0
    assert turn(0.94, **gated).monitor_updates == 3  # 5 · 0.06 / 0.1


@pytest.mark.parametrize("accuracy", [0.5, 0.99])
def test_in_the_warm_up_the_monitor_learns_whatever_the_gates_say(accuracy):
    found = turn(accuracy, in_warmup=True, freeze_monitor_above=0.95, freeze_policy_below=0.6)
    assert found == Turn(5, policy_learns=False)


def test_the_adaptive_rule_holds_in_the_warm_up():
    assert turn(0.8, in_warmup=True, rule="adaptive") == Turn(10, policy_learns=False)


@pytest.mark.parametrize(("low", "high"), [(0.8, 0.7), (0.7, 0.7)])
def test_gates_that_would_stop_both_players_are_refused(low, high):
    with pytest.raises(UserError, match="must be below freeze_monitor_above"):
        ScheduleConfig.from_dict({"freeze_policy_below": low, "freeze_monitor_above": high})


@pytest.mark.parametrize("name", ["freeze_policy_below", "freeze_monitor_above"])
def test_one_gate_alone_is_fine(name):
    assert getattr(ScheduleConfig.from_dict({name: 0.7}), name) == 0.7


def test_smoothing_by_hand():
    # The first value as it is; 0.5 + 0.25 · (0.9 - 0.5).
    assert smoothed(None, 0.5, 0.25) == 0.5
    assert smoothed(0.5, 0.9, 0.25) == pytest.approx(0.6)
