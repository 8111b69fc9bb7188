"""How far each player moved: ratios by hand, and what is told once."""

import json

import pytest

from rlhf_minmax.evaluation.dynamics import Dynamics


def step(monitor: int | None = 5, policy: int | None = 2, *, rates=(0.002, 0.001), value=0.0):
    """Metrics of a step; None for a player that did not learn."""
    metrics = {"minmax/value": value, "monitor/learning_rate": rates[0], "policy/learning_rate": rates[1]}
    for name, updates in (("monitor", monitor), ("policy", policy)):
        if updates is not None:
            metrics[f"{name}/updates"] = updates
    return metrics


def test_ratios_by_hand():
    dynamics = Dynamics()
    # The warm-up counts for neither.
    found = dynamics.update(step(5, None))
    assert found["dynamics/update_ratio"] is None and found["dynamics/time_scale"] is None
    # 0.002 · 5 / (0.001 · 2).
    found = dynamics.update(step(5, 2))
    assert found["dynamics/update_ratio"] == 2.5
    assert found["dynamics/time_scale"] == pytest.approx(5.0)
    # A frozen monitor; then (0.01 + 0) / (0.002 + 0.002).
    found = dynamics.update(step(None, 2))
    assert found["dynamics/update_ratio"] == 0
    assert found["dynamics/time_scale"] == pytest.approx(2.5)
    # Rates of the step count: (0.01 + 0.001 · 1) / (0.004 + 0.004 · 1).
    found = dynamics.update(step(1, 1, rates=(0.001, 0.004)))
    assert found["dynamics/update_ratio"] == 1
    assert found["dynamics/time_scale"] == pytest.approx(0.011 / 0.008)
    # A policy at a gate.
    assert dynamics.update(step(5, None))["dynamics/time_scale"] == pytest.approx(0.011 / 0.008)
    assert dynamics.policy_steps == 3


def test_oscillation_is_that_of_the_last_sixteen_values():
    dynamics = Dynamics()
    for i in range(30):
        found = dynamics.update(step(value=float(i % 2)))
    assert found["dynamics/oscillation"] == 1
    for i in range(16):
        found = dynamics.update(step(value=float(i)))
    assert found["dynamics/oscillation"] == 0
    assert dynamics.values == [float(i) for i in range(16)]


def warnings(dynamics, steps, **changes):
    told = []
    for _ in range(steps):
        dynamics.update(step(**changes))
        told.append(dynamics.time_scale_warning())
    return told


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        # 0.05 · 5 / (0.001 · 2) = 125; 0.001 · 5 / (0.05 · 2) = 1/20.
        ((0.05, 0.001), "the monitor has been moving 125 times as far as the policy"),
        ((0.001, 0.05), "the policy has been moving 20 times as far as the monitor"),
    ],
)
def test_a_time_scale_that_strayed_is_told_once_after_eight_steps(rates, words):
    told = warnings(Dynamics(), 12, rates=rates)
    assert told[:7] == [None] * 7 and told[8:] == [None] * 4
    assert words in told[7]


def test_a_monitor_that_stood_still_is_told_of():
    told = warnings(Dynamics(), 8, monitor=None)
    assert "the monitor has stood still in all 8 steps in which the policy learned" in told[7]


# r_m · 5 / (r_p · 2): 9.5, 1 / 9.6, 10 and 1 / 10.
@pytest.mark.parametrize("rates", [(0.0038, 0.001), (0.001, 0.024), (4.0, 1.0), (1.0, 25.0)])
def test_a_time_scale_of_up_to_ten_is_fine(rates):
    assert warnings(Dynamics(), 12, rates=rates) == [None] * 12


def test_steps_without_the_policy_do_not_count_towards_a_warning():
    dynamics = Dynamics()
    assert warnings(dynamics, 20, policy=None, rates=(0.05, 0.001)) == [None] * 20
    assert [text is None for text in warnings(dynamics, 8, rates=(0.05, 0.001))] == [True] * 7 + [False]


def test_each_rollback_is_told_of():
    dynamics = Dynamics()
    counts = [0.0, 0.0, 1.0, 1.0, 2.0]
    told = [dynamics.rollback_warning({"guard/rollbacks": count}) for count in counts]
    assert [text is not None for text in told] == [False, False, True, False, True]
    assert told[2] is not None and "put back to where it was last good" in told[2]
    policy = [dynamics.rollback_warning({"guard/policy_rollbacks": count}) for count in counts]
    assert [text is not None for text in policy] == [False, False, True, False, True]
    assert policy[2] is not None and "policy" in policy[2]
    assert dynamics.rollback_warning({}) is Dynamics().rollback_warning({}) is None


def test_state_goes_through_json():
    dynamics = Dynamics()
    warnings(dynamics, 9, rates=(0.05, 0.001), value=0.5)
    dynamics.rollback_warning({"guard/rollbacks": 1.0})
    other = Dynamics(**json.loads(json.dumps(dynamics.to_dict())))
    assert other == dynamics
    for each in (dynamics, other):
        assert each.time_scale_warning() is None and each.rollback_warning({"guard/rollbacks": 1.0}) is None
