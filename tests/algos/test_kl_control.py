"""Controllers of the KL coefficient: one that stays, one that follows the divergence."""

from __future__ import annotations

import json
import math

import pytest

from rlhf_algos.kl_control import AdaptiveKLController, FixedKLController, KLController


def test_a_fixed_coefficient_stays():
    controller: KLController = FixedKLController(0.05)
    controller.update(1000.0, 1000)
    assert controller.value == 0.05
    assert controller.state() == {"value": 0.05}
    controller.load_state({"value": 3.0})  # the setting counts, not what an old run had
    assert controller.value == 0.05


@pytest.mark.parametrize(
    ("current", "steps", "expected"),
    [
        # 0.2 · (1 + error · steps / 1000), error = current / 6 - 1 within ±0.2
        (6.0, 500, 0.2),
        (6.6, 500, 0.2 * (1 + 0.1 * 0.5)),
        (5.4, 500, 0.2 * (1 - 0.1 * 0.5)),
        (12.0, 500, 0.2 * (1 + 0.2 * 0.5)),
        (0.0, 500, 0.2 * (1 - 0.2 * 0.5)),
        (-3.0, 1000, 0.2 * (1 - 0.2)),
        (12.0, 4999, 0.2 * (1 + 0.2 * 4.999)),
        (12.0, 0, 0.2),
    ],
)
def test_adaptive_coefficient_golden(current, steps, expected):
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(current, steps)
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_the_divergence_settles_at_the_target():
    """On a policy whose divergence is the lower the higher the coefficient."""
    for start in (1e-3, 10.0):
        controller = AdaptiveKLController(start, target=6.0, horizon=100)
        for _ in range(600):
            controller.update(3.0 / controller.value, 20)
        assert 3.0 / controller.value == pytest.approx(6.0, rel=1e-3)


def test_state_survives_json():
    one, other = (AdaptiveKLController(0.2, target=6.0, horizon=1000) for _ in range(2))
    for current in (7.0, 5.0, 6.3):
        one.update(current, 300)
    other.load_state(json.loads(json.dumps(one.state())))
    assert other.value == one.value != 0.2
    for controller in (one, other):
        controller.update(9.0, 100)
    assert other.value == one.value


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_coefficients_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match=r"^value must be a finite number >= 0"):
        FixedKLController(value)
    with pytest.raises(ValueError, match=r"^target must be a finite number >= 0"):
        AdaptiveKLController(0.1, value, 10)


@pytest.mark.parametrize("name", ["init", "target", "horizon"])
def test_an_adaptive_controller_needs_numbers_above_zero(name):
    with pytest.raises(ValueError, match=f"^{name} must be above 0, got 0"):
        AdaptiveKLController(**{"init": 0.2, "target": 6.0, "horizon": 1000.0} | {name: 0.0})
    assert FixedKLController(0.0).value == 0.0


def test_updates_out_of_range_are_refused():
    controller = AdaptiveKLController(0.2, target=6.0, horizon=10)
    for current in (math.nan, math.inf):
        with pytest.raises(ValueError, match="current KL must be finite"):
            controller.update(current, 1)
    for steps in (50, -1):
        with pytest.raises(
            ValueError, match="steps must be from 0 to below 5 times the horizon, which is 10"
        ):
            controller.update(6.0, steps)
    assert controller.value == 0.2
