"""How the multiplier moves: every rule by hand, bounds, and signs."""

import math
import random

import pytest

from rlhf_minmax.dual_ascent import DualSettings, DualState, update_multiplier

RULES = ("multiplicative", "additive", "log", "pid")


def settings(rule, **changes):
    return DualSettings(**{"rule": rule, "threshold": 0.05, "step_size": 0.5, "smoothing": 0.5} | changes)


# α = 0.5, ε = 0.05, s = 0.5, λ0 = 2, violations 0.25 then 0.45.
# Step 1: v̄ = 0.25 (nothing to smooth with), e = 0.2. Step 2: v̄ = 0.25 + 0.5·0.2 = 0.35, e = 0.3.
# multiplicative: 2·1.5 = 3, 3·1.5 = 4.5.      additive: 2 + 0.5·0.2 = 2.1, 2.1 + 0.5·0.3 = 2.25.
# log: 2·exp(0.1), 2·exp(0.1 + 0.15).
# pid, Σ0 = λ0/α = 4, P = 1, D = 0.5: Σ = 4.2, λ = 0.5·(0.2 + 4.2 + 0) = 2.2;
#                                     Σ = 4.5, rise 0.1, λ = 0.5·(0.3 + 4.5 + 0.05) = 2.425.
@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [
        ("multiplicative", 3.0, 4.5),
        ("additive", 2.1, 2.25),
        ("log", 2 * math.exp(0.1), 2 * math.exp(0.25)),
        ("pid", 2.2, 2.425),
    ],
)
def test_two_steps_by_hand(rule, first, second):
    state = update_multiplier(DualState(2.0, integral=4.0), 0.25, settings(rule))
    assert (state.multiplier, state.violation_ema) == pytest.approx((first, 0.25))
    state = update_multiplier(state, 0.45, settings(rule))
    assert (state.multiplier, state.violation_ema) == pytest.approx((second, 0.35))


@pytest.mark.parametrize(
    ("rule", "expected"),
    # v̄ = 0.01, e = -0.04: 2·0.5; 2 - 0.02; 2·exp(-0.02); Σ = 4 - 0.04, λ = 0.5·(-0.04 + 3.96).
    [("multiplicative", 1.0), ("additive", 1.98), ("log", 2 * math.exp(-0.02)), ("pid", 1.96)],
)
def test_a_satisfied_constraint_lowers_the_multiplier(rule, expected):
    state = update_multiplier(DualState(2.0, integral=4.0), 0.01, settings(rule))
    assert state.multiplier == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rule", "expected"),
    # v̄ = ε = 0.25, e = 0: multiplicative knows but up and down, 2·0.5; the others stay.
    [("multiplicative", 1.0), ("additive", 2.0), ("log", 2.0), ("pid", 2.0)],
)
def test_at_the_threshold_a_constraint_is_met(rule, expected):
    bounds = settings(rule, threshold=0.25)
    state = update_multiplier(DualState(2.0, integral=4.0), 0.25, bounds)
    assert state.multiplier == expected and (state.met, state.violated) == (True, 0)
    # v̄ = 0.5: what is above the threshold from now on is overshoot.
    assert update_multiplier(state, 0.75, bounds).overshoot == 0.25


def test_the_integral_does_not_wind_up_at_the_cap():
    bounds = settings("pid", maximum=3.0, smoothing=1.0)
    state = DualState(1.0, integral=2.0)
    for _ in range(100):
        state = update_multiplier(state, 1.0, bounds)
    # Σ stops at 3 / 0.5 = 6; then e = -0.05 gives λ = 0.5·(-0.05 + 5.95) = 2.95, below the cap at once.
    assert (state.multiplier, state.integral) == (3.0, 6.0)
    assert update_multiplier(state, 0.0, bounds).multiplier == pytest.approx(2.95)


@pytest.mark.parametrize("rule", RULES)
def test_the_multiplier_stays_within_its_bounds(rule):
    bounds = settings(rule, step_size=0.9, minimum=0.5, maximum=3.0, smoothing=1.0)
    state = DualState(2.0, integral=2.0 / 0.9)
    for _ in range(30):
        state = update_multiplier(state, 1.0, bounds)
    assert state.multiplier == 3.0 and state.saturated(bounds)
    for _ in range(1000):
        state = update_multiplier(state, 0.0, bounds)
    assert state.multiplier == 0.5 and state.saturated(bounds)
    assert not DualState(1.0).saturated(bounds)


def test_log_never_changes_sign():
    rng, wide = random.Random(0), settings("log", minimum=0.0, maximum=math.inf, step_size=3.0, smoothing=1.0)
    state = DualState(1e-3)
    for _ in range(200):
        state = update_multiplier(state, rng.choice([0.0, 1.0]), wide)
        assert state.multiplier > 0


@pytest.mark.parametrize(("violation", "bound"), [(1.0, "maximum"), (0.0, "minimum")])
def test_a_step_beyond_all_measure_ends_at_a_bound(violation, bound):
    huge = settings("log", step_size=1e18)
    assert update_multiplier(DualState(1.0), violation, huge).multiplier == getattr(huge, bound)


def test_pid_starts_at_the_initial_multiplier_and_forgets_a_met_constraint():
    # Σ0 = λ0/α, so at v̄ = ε, where nothing is to be corrected, λ = α·Σ0 = λ0.
    state = update_multiplier(DualState(3.0, integral=3.0 / 0.5), 0.05, settings("pid"))
    assert state.multiplier == pytest.approx(3.0)
    assert DualState(3.0).integral == 0
    for _ in range(500):
        state = update_multiplier(state, 0.0, settings("pid"))
    assert state.integral == 0.0 and state.multiplier == 0.05


def test_pid_reacts_to_a_rise_and_not_to_a_fall():
    gains = settings("pid", smoothing=1.0, proportional_gain=0.0, derivative_gain=1.0)
    start = DualState(1.0, violation_ema=0.25, integral=2.0)
    # Rise 0.2: Σ = 2.4, λ = 0.5·(2.4 + 0.2). Fall 0.2: Σ = 2 and no D term.
    assert update_multiplier(start, 0.45, gains).multiplier == pytest.approx(1.3)
    assert update_multiplier(start, 0.05, gains).multiplier == pytest.approx(1.0)


@pytest.mark.parametrize("rule", ["additive", "log", "pid"])
def test_a_larger_violation_raises_the_multiplier_more(rule):
    multipliers = [
        update_multiplier(DualState(2.0, integral=4.0), v, settings(rule)).multiplier for v in (0.1, 0.3, 0.9)
    ]
    assert 2.0 < multipliers[0] < multipliers[1] < multipliers[2]


def test_smoothing_is_an_exponential_average():
    state, expected = DualState(1.0), None
    for violation in (0.4, 0.0, 1.0, 0.2):
        expected = violation if expected is None else 0.7 * expected + 0.3 * violation
        state = update_multiplier(state, violation, settings("log", smoothing=0.3))
        assert state.violation_ema == pytest.approx(expected)
