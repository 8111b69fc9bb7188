"""How a constraint's multiplier moves, what its metrics are called, and its checkpoint."""

import json
import math

import pytest

from raises import raises_error
from rlhf_minmax.config.constraints import ConstraintConfig
from rlhf_minmax.constraints.controllers import Controller


def controller(name="c", **settings):
    start = settings.pop("start", 1.0)
    return Controller(name, ConstraintConfig(**settings).dual_settings(), start)


def test_metrics_by_hand():
    # ε = 0.1, s = 0.5, additive with α = 1 from λ = 1.
    # v:   0.3  0.0   0.4     0.0
    # v̄:   0.3  0.15  0.275   0.1375
    # e:   0.2  0.05  0.175   0.0375
    # Σ max(0, v - ε): 0.2, 0.2, 0.5, 0.5. λ: 1.2, 1.25, 1.425, 1.4625. v̄ was never within ε: no overshoot.
    found = controller("refusal", threshold=0.1, rule="additive", step_size=1.0)
    metrics = {}
    for violation in (0.3, 0.0, 0.4, 0.0):
        metrics = found.update(violation)
    assert metrics == pytest.approx(
        {
            "constraint/refusal/violation": 0.0,
            "constraint/refusal/violation_ema": 0.1375,
            "constraint/refusal/fraction": 1.0,
            "constraint/refusal/cumulative": 0.5,
            "constraint/refusal/overshoot": 0.0,
            "dual/refusal/lambda": 1.4625,
            "dual/refusal/saturated": 0.0,
            "dual/refusal/log_lambda": math.log(1.4625),
        }
    )
    # v̄ = 0.06875 is within; then 0.484375 and 0.3421875: two more of seven above, overshoot 0.384375.
    for violation in (0.0, 0.9, 0.2):
        metrics = found.update(violation)
    assert metrics["constraint/refusal/fraction"] == pytest.approx(6 / 7)
    assert metrics["constraint/refusal/overshoot"] == pytest.approx(0.384375)
    assert metrics["constraint/refusal/cumulative"] == pytest.approx(0.5 + 0.8 + 0.1)


def test_a_violation_at_the_threshold_is_none():
    metrics = controller(threshold=0.25, rule="additive").update(0.25)
    assert metrics["constraint/c/fraction"] == metrics["constraint/c/cumulative"] == 0
    assert metrics["dual/c/lambda"] == 1.0


def test_in_the_warm_up_only_the_average_moves():
    found = controller(rule="additive", step_size=1.0, threshold=0.1, warmup_steps=2)
    metrics = [found.update(violation) for violation in (0.5, 0.3, 0.3)]
    # v̄ = 0.5, 0.4, 0.35; the third moves λ by 0.25.
    assert [each["dual/c/lambda"] for each in metrics] == pytest.approx([1.0, 1.0, 1.25])
    assert metrics[1]["constraint/c/violation_ema"] == pytest.approx(0.4)
    assert metrics[1]["constraint/c/fraction"] == 1


def test_pid_does_not_sum_up_in_the_warm_up():
    found = controller(rule="pid", warmup_steps=3, threshold=0.1)
    for _ in range(3):
        found.update(0.9)
    # λ = α (e + Σ) with Σ = λ0 / α + e and no rise: 0.5 · (0.8 + 2 + 0.8).
    assert found.update(0.9)["dual/c/lambda"] == pytest.approx(1.8)


def test_the_parts_of_pid_add_up_to_the_multiplier_in_the_warm_up_too():
    found = controller(rule="pid", start=1.0, warmup_steps=2, threshold=0.1, smoothing=1.0)
    metrics = [found.update(violation) for violation in (0.9, 0.3, 0.5)]
    for each in metrics:
        parts = [each[f"dual/c/{part}"] or 0.0 for part in "pid"]
        assert sum(parts) == pytest.approx(each["dual/c/lambda"])
    # λ stays 1 = α Σ0 for two steps; then e = 0.4, Σ = 2 + 0.4, a rise of 0.2: 0.5 · (0.4, 2.4, 0.5 · 0.2).
    assert [metrics[1][f"dual/c/{part}"] for part in "pid"] == [0.0, 1.0, 0.0]
    assert [metrics[2][f"dual/c/{part}"] for part in "pid"] == pytest.approx([0.2, 1.2, 0.05])


def test_the_gains_of_pid_are_settings():
    found = controller(rule="pid", threshold=0.1, smoothing=1.0, proportional_gain=2, derivative_gain=0)
    found.update(0.3)
    metrics = found.update(0.5)
    # e = 0.4: α P e = 0.5 · 2 · 0.4; no D although the violation rose.
    assert metrics["dual/c/p"] == pytest.approx(0.4) and metrics["dual/c/d"] == 0
    with raises_error("invalid_value", key="proportional_gain"):
        ConstraintConfig.from_dict({"proportional_gain": -1})


def test_a_multiplier_that_goes_back_takes_its_parts_with_it():
    found = controller(rule="pid", threshold=0.1, smoothing=1.0)
    good, kept = found.update(0.4), found.to_dict()
    found.update(0.9)
    found.go_back(kept)
    names = [f"dual/c/{name}" for name in ("lambda", "p", "i", "d")]
    back = found.metrics(0.4)
    assert [back[name] for name in names] == [good[name] for name in names]


def test_a_fixed_multiplier_stays_and_is_measured():
    found = controller(rule="fixed", start=3.0)
    metrics = {}
    for _ in range(4):
        metrics = found.update(0.45)
    assert metrics["dual/c/lambda"] == 3.0
    assert metrics["constraint/c/cumulative"] == pytest.approx(1.6) and metrics["constraint/c/fraction"] == 1


def test_a_multiplier_at_a_bound_is_told_and_zero_has_no_logarithm():
    low = controller(rule="additive", start=0.1, lambda_min=0.0, step_size=10.0, threshold=0.5)
    metrics = low.update(0.0)
    assert metrics["dual/c/lambda"] == 0 and metrics["dual/c/saturated"] == 1
    assert "dual/c/log_lambda" not in metrics
    small = controller(rule="fixed", start=0.5).update(0.0)
    assert small["dual/c/log_lambda"] == pytest.approx(math.log(0.5))
    assert controller(start=19.9, step_size=5.0).update(1.0)["dual/c/saturated"] == 1
    assert controller().update(0.5)["dual/c/saturated"] == 0


@pytest.mark.parametrize("rule", ["multiplicative", "log"])
def test_rules_that_cannot_leave_zero_are_refused_it(rule):
    with raises_error("invalid_value"):
        ConstraintConfig.from_dict({"rule": rule, "lambda_min": 0})


def test_a_step_that_takes_the_whole_multiplier_is_refused():
    assert ConstraintConfig.from_dict({"rule": "multiplicative", "step_size": 0.9})
    assert ConstraintConfig.from_dict({"rule": "log", "step_size": 1.0})
    with raises_error("invalid_value"):
        ConstraintConfig.from_dict({"rule": "multiplicative", "step_size": 1.0})


def test_bounds_that_leave_no_room_are_refused():
    with raises_error("invalid_value"):
        ConstraintConfig.from_dict({"lambda_min": 3, "lambda_max": 3})


@pytest.mark.parametrize("rule", ["fixed", "multiplicative", "additive", "log", "pid"])
def test_state_goes_through_json(rule):
    found, other = controller(rule=rule), controller(rule=rule, start=9.0)
    for violation in (0.4, 0.01, 0.3):
        found.update(violation)
    other.load(json.loads(json.dumps(found.to_dict())))
    assert other.state == found.state
    assert other.update(0.2) == found.update(0.2)
