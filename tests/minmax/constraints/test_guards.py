"""A monitor that collapsed is found and put back; each sign of collapse, and its absence."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_minmax.config.constraints import GuardConfig
from rlhf_minmax.constraints.rollback import MonitorGuard, PolicyGuard, collapse
from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer

CONFIG = GuardConfig()
WELL: dict[str, Any] = {
    "false_positive_rate": 0.1,
    "false_negative_rate": 0.1,
    "zero_std": 0.0,
    "excess": 0.3,
    "saturated": True,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"false_positive_rate": 0.95}, "calls 95% of right answers wrong with its multiplier at the cap"),
        ({"false_negative_rate": 1.0}, "calls 100% of wrong answers right with its multiplier at the cap"),
        ({"false_negative_rate": 1.0, "false_positive_rate": None}, "calls 100% of wrong answers right"),
        ({"zero_std": 0.95, "saturated": False}, "95% of the groups of critiques have no spread"),
    ],
)
def test_each_sign_of_collapse(changes, words):
    assert words in (collapse(CONFIG, **(WELL | changes)) or "")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"false_positive_rate": None, "false_negative_rate": None},
        {"false_positive_rate": 0.94, "false_negative_rate": 0.94, "zero_std": 0.9},
        {"false_positive_rate": 1.0, "saturated": False},
        {"false_positive_rate": 1.0, "false_negative_rate": 1.0, "zero_std": 1.0, "excess": 0.0},
        {"false_positive_rate": 1.0, "false_negative_rate": 1.0, "zero_std": 1.0, "excess": -0.1},
    ],
    ids=["well", "no labels", "just below", "below the cap", "at the threshold", "truthful"],
)
def test_without_a_sign(changes):
    assert collapse(CONFIG, **(WELL | changes)) is None


def test_thresholds_are_settings():
    strict = GuardConfig(one_sided_rate=0.6, zero_std_share=0.2)
    bad: dict[str, Any] = WELL | {"false_positive_rate": 0.6}
    assert collapse(strict, **bad) is not None
    flat: dict[str, Any] = WELL | {"zero_std": 0.3}
    assert collapse(strict, **flat) is not None


class Monitor:
    """One weight that counts the steps taken, under a guard."""

    def __init__(self, **settings):
        self.weight = torch.zeros(2, dtype=torch.bfloat16)
        self.guard = MonitorGuard(GuardConfig(**settings), [self.weight])

    def step(self, violation, sign=None):
        """Critiques of the weight as it is have a violation; then it is updated, and the guard is told."""
        self.weight += 1
        collapsed = self.guard.observe(sign)
        if sign is None:
            self.guard.remember(violation, 0.05, {"multiplier": violation})
        return collapsed

    def back(self):
        state = self.guard.roll_back()
        return self.weight.tolist(), state


def test_patience_counts_steps_in_a_row():
    guard = MonitorGuard(GuardConfig(patience=3), [torch.zeros(1)])
    signs = ["a", "b", None, "a", "a", "a", "a", None, "a"]
    assert [guard.observe(sign) for sign in signs] == [False] * 5 + [True, True] + [False] * 2


def test_what_is_put_back_wrote_the_good_critiques():
    """Its updates on them may be what ruined it."""
    monitor = Monitor()
    monitor.step(0.01)
    monitor.step(0.5, "collapsed")
    assert monitor.back() == ([0, 0], {"multiplier": 0.01})


def test_only_good_monitors_are_remembered():
    monitor = Monitor()
    # (violation, weight that would be put back): above the threshold the lowest so far is good, else any.
    for violation, good in ((0.5, 0), (0.6, 0), (0.4, 2), (0.01, 3), (0.04, 4), (0.06, 4), (0.05, 6)):
        monitor.step(violation)
        own = monitor.weight.clone()
        kept = [value.tolist() for value in monitor.guard.good]
        assert kept == [[good, good]]
        assert torch.equal(monitor.weight, own)


def test_a_monitor_that_looks_collapsed_is_not_remembered():
    monitor = Monitor()
    monitor.step(0.2)
    monitor.step(0.1, "collapsed")
    assert monitor.back()[0] == [0, 0]


def test_going_back_must_help():
    monitor = Monitor()
    assert not monitor.guard.is_worse(1.0)
    monitor.step(0.3)
    assert not monitor.guard.is_worse(0.35) and monitor.guard.is_worse(0.45)


def test_a_monitor_is_put_back_bit_for_bit_and_goes_on_from_there():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, generator=generator), torch.randn(4, generator=generator).bfloat16()]
    guard = MonitorGuard(GuardConfig(patience=1), weights)
    guard.observe(None)
    guard.remember(0.01, 0.05, {"multiplier": 2.0})
    good = [weight.clone() for weight in weights]
    for weight in weights:
        weight.mul_(-3)
    assert guard.observe("collapsed")
    assert guard.roll_back() == {"multiplier": 2.0}
    assert all(torch.equal(a, b) for a, b in zip(weights, good, strict=True))
    assert (guard.rollbacks, guard.collapsed_steps) == (1, 0)
    # The monitor that was put back writes the next critiques, so it is the one to be kept for them.
    for weight in weights:
        weight.add_(1)
    guard.observe(None)
    guard.remember(0.02, 0.05, {})
    assert all(torch.equal(a, b) for a, b in zip(guard.good, good, strict=True))


def test_without_a_good_monitor_the_start_is_put_back():
    monitor = Monitor()
    monitor.step(0.9, "collapsed")
    assert monitor.back() == ([0, 0], None)


def test_state_goes_through_a_checkpoint(tmp_path):
    monitor, other = Monitor(), Monitor()
    for violation, sign in ((0.2, None), (0.02, None), (0.9, "collapsed"), (0.9, "collapsed")):
        monitor.step(violation, sign)
    monitor.guard.save(tmp_path / "good")
    other.weight.copy_(monitor.weight)
    other.guard.load(json.loads(json.dumps(monitor.guard.to_dict())), tmp_path / "good")
    assert other.guard.to_dict() == monitor.guard.to_dict()
    # The next critiques are the checkpoint's monitor's, 4.
    assert not monitor.step(0.01) and not other.step(0.01)
    assert monitor.back() == other.back() == ([4, 4], {"multiplier": 0.01})


def test_without_rollback_collapse_is_counted_and_no_weights_are_kept():
    monitor = Monitor(rollback=False, patience=2)
    assert [monitor.step(0.01), monitor.step(0.9, "a"), monitor.step(0.9, "a")] == [False, False, True]
    assert monitor.guard.good == []
    kept = {"collapsed_steps": 2, "rollbacks": 0, "lowest": 0.01, "known": {"multiplier": 0.01}}
    assert monitor.guard.to_dict() == kept and monitor.guard.is_worse(0.9)


def policy_of(**settings):
    """A guard, and a step: the weight moves by one after the value of what it was has been measured."""
    weight = torch.zeros(2)
    guard = PolicyGuard(GuardConfig(value_drop=0.5, **settings), [weight])

    def step(value):
        weight.add_(1)
        return guard.observe(value, scale=2.0)

    return guard, weight, step


def test_a_policy_whose_value_falls_far_is_put_back_where_it_was_best():
    guard, weight, step = policy_of()
    # Smoothed by .7 and .3: 1, 1 (measured on the start, 0, then on 1), and after -1: .4, -.02, -.314. The
    # fall is .6, 1.02, 1.314, and 0.5 · 2 = 1 is allowed.
    assert [step(1.0), step(1.0), step(-1.0), step(-1.0)] == [False, False, False, True]
    assert guard.best == 1.0 and guard.value == pytest.approx(-0.02)
    guard.roll_back()
    assert weight.tolist() == [1.0, 1.0] and guard.rollbacks == 1
    # What is measured next is the policy that was put back, whose value is unknown again.
    assert not step(-3.0) and guard.best == -3.0
    assert guard.good[0].tolist() == [1.0, 1.0]


def test_a_policy_guard_goes_through_a_checkpoint(tmp_path):
    guard, weight, step = policy_of()
    other, other_weight, other_step = policy_of()
    for value in (1.0, 2.0, -1.0):
        step(value)
    guard.save(tmp_path / "good")
    other_weight.copy_(weight)
    other.load(json.loads(json.dumps(guard.to_dict())), tmp_path / "good")
    assert other.to_dict() == guard.to_dict()
    assert step(-3.0) is other_step(-3.0) is True
    guard.roll_back()
    other.roll_back()
    assert weight.tolist() == other_weight.tolist() == [1.0, 1.0]


def test_without_rollback_a_fall_is_reported_and_no_policy_is_kept():
    guard, _, step = policy_of(rollback=False)
    assert [step(1.0), step(-4.0)] == [False, True]
    assert guard.good == []


@pytest.mark.slow
@pytest.mark.parametrize("rollback", [True, False])
def test_the_real_policy_is_put_back(make_game, rollback):
    overrides = (f"guards.rollback={str(rollback).lower()}", "guards.value_drop=0.01")
    optimizer, truthful, _ = game_of(make_game, *overrides)
    start = [parameter.detach().clone() for parameter in optimizer.policy.parameters]
    metrics = optimizer.step(truthful, seed=0)
    assert (metrics["guard/policy_collapsed"], metrics["guard/policy_rollbacks"]) == (0, 0)
    assert optimizer.policy_guard is not None
    worth_less = replace(truthful, rewards=truthful.rewards - 10)
    metrics = optimizer.step(worth_less, seed=1)
    assert (metrics["guard/policy_collapsed"], metrics["guard/policy_rollbacks"]) == (1, rollback)
    same = [torch.equal(a, b) for a, b in zip(optimizer.policy.parameters, start, strict=True)]
    assert all(same) == rollback
    assert bool(optimizer.policy.stepper.optimizer.state) != rollback


def game_of(make_game, *overrides):
    """A real optimizer with a truthful and a collapsed pass of its monitor."""
    pipeline, stories = make_game("guards.patience=1", "constraint.lambda_max=5", *overrides)
    output = pipeline.forward_pass(stories.train[:12], seed=0)
    zeros = torch.zeros_like(output.weighted_violation)
    silent = [replace(each, parsed=None) for each in output.critiques]
    truthful = replace(output, weighted_violation=zeros)
    collapsed = replace(output, weighted_violation=zeros + 1, critiques=silent)
    return DualPPOOptimizer(pipeline, pipeline.config), truthful, collapsed


@pytest.mark.slow
def test_the_real_monitor_is_put_back_with_its_multiplier(make_game):
    optimizer, truthful, collapsed = game_of(make_game)
    assert optimizer.monitor is not None
    start = [parameter.detach().clone() for parameter in optimizer.monitor.parameters]
    metrics = optimizer.step(truthful, seed=0, policy_learns=False)
    assert (metrics["guard/collapsed"], metrics["guard/rollbacks"]) == (0, 0)
    dual = optimizer.dual
    moved = [parameter.detach().clone() for parameter in optimizer.monitor.parameters]
    assert not all(torch.equal(a, b) for a, b in zip(moved, start, strict=True))
    # v̄ = 0.5, e = 0.45: λ = 5 · exp(-0.025 + 0.225) is cut to its cap, 5; no critique speaks. All is put
    # back, but that there was a violation, 1 - 0.05 above the threshold, is not forgotten.
    metrics = optimizer.step(collapsed, seed=1, policy_learns=False)
    assert (metrics["guard/collapsed"], metrics["guard/rollbacks"]) == (1, 1)
    assert metrics["dual/lambda"] == metrics["dual/truthfulness/lambda"] == dual.multiplier < 5
    assert metrics["dual/saturated"] == 0 and metrics["constraint/violation"] == 1
    counted = {"updates": 2, "violated": 1, "cumulative": 0.95, "met": True, "overshoot": pytest.approx(0.45)}
    assert optimizer.dual == replace(dual, **counted)
    now = optimizer.monitor.parameters
    assert all(torch.equal(a, b) for a, b in zip(now, start, strict=True))
    assert not optimizer.monitor.stepper.optimizer.state


def test_a_monitor_that_nothing_holds_to_the_truth_does_not_collapse(make_game):
    off = ("constraint.rule=fixed", "training.constraint_penalty_lambda=0")
    optimizer, truthful, collapsed = game_of(make_game, *off)
    optimizer.step(truthful, seed=0, policy_learns=False)
    metrics = optimizer.step(collapsed, seed=1, policy_learns=False)
    assert (metrics["guard/collapsed"], metrics["guard/rollbacks"], metrics["constraint/violation"]) == (
        0,
        0,
        1,
    )


def test_without_rollback_the_real_monitor_goes_on(make_game):
    optimizer, truthful, collapsed = game_of(make_game, "guards.rollback=false")
    optimizer.step(truthful, seed=0, policy_learns=False)
    for _ in range(2):
        metrics = optimizer.step(collapsed, seed=1, policy_learns=False)
    assert (metrics["guard/collapsed"], metrics["guard/rollbacks"]) == (1, 0)
    assert optimizer.monitor is not None and optimizer.monitor.stepper.optimizer.state
