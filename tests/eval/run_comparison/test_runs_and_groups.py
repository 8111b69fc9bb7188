"""Runs measured as a whole, in groups of seeds, and against each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlhf_eval.run_comparison import (
    Curve,
    RunCurves,
    compare_pairs,
    matched_kl,
    measure_run,
    shared_threshold,
    smoothed,
    summarise_group,
)

STEPS = np.arange(1.0, 41)


def run(values: Any, **more: Any) -> RunCurves:
    values = np.asarray(values, dtype=float)
    return RunCurves(metric=Curve(STEPS[: len(values)], values), **more)


def rising(rate: float, noise: float = 0.0, seed: int = 0) -> RunCurves:
    wobble = noise * np.random.default_rng(seed).normal(size=len(STEPS))
    return run(
        1 - np.exp(-rate * STEPS) + wobble,
        loss=Curve(STEPS, np.exp(-rate * STEPS) + wobble),
        tokens=Curve(STEPS, 100 * STEPS),
        seconds=Curve(STEPS, 2 * STEPS),
        kl=Curve(STEPS[9::10], 0.01 * rate * STEPS[9::10]),
    )


def test_a_run_is_measured() -> None:
    # 10 steps at 0, then 30 at 1. The mean over 11 steps first reaches .9 where ten of them are ones: the
    # window of step s is s-5..s+5, so at s = 15 it has 11..20, ten of eleven: 10/11 = .909.
    stair = run([0.0] * 10 + [1.0] * 30, tokens=Curve(STEPS, 100 * STEPS), seconds=Curve(STEPS, 2 * STEPS))
    threshold = shared_threshold([stair])
    assert threshold == pytest.approx(0.9)
    found = measure_run(stair, threshold=threshold, kl=math.nan)
    assert found["convergence_step"] == 15
    assert (found["convergence_tokens"], found["convergence_seconds"]) == (1500, 30)
    assert (found["final"], found["gain"], found["oscillation"]) == (1, 1, pytest.approx(1))
    assert found["metric_variance"] == 0 and found["steps"] == 40 and found["tokens"] == 4000


def test_what_is_missing_is_none_and_never_zero() -> None:
    found = measure_run(RunCurves(facts={"step_time": 0.5}), threshold=1.0, kl=0.1)
    assert {name for name, value in found.items() if value is not None} == {"step_time"}
    bare = measure_run(run([1.0, 2.0]), threshold=math.nan, kl=math.nan)
    assert bare["loss_variance"] is None and bare["final_kl"] is None and bare["convergence_tokens"] is None
    assert math.isnan(shared_threshold([RunCurves()])) and math.isnan(matched_kl([RunCurves()]))


def test_less_can_be_better() -> None:
    falling = run(2 - np.linspace(0, 1, 40))
    threshold = shared_threshold([falling], lower_is_better=True)
    # Start 2, the last four of the line 1 + (0, 1, 2, 3)/39, mean 1 + 1.5/39: nine tenths of the way.
    assert threshold == pytest.approx(2 - 0.9 * (1 - 1.5 / 39))
    found = measure_run(falling, threshold=threshold, kl=math.nan, lower_is_better=True)
    assert found["gain"] == pytest.approx(1 - 1.5 / 39)
    # The line falls below it first at index k with k/39 >= .9 (1 - 1.5/39) = .865: k = 34, step 35.
    assert found["convergence_step"] == 35


def test_held_out_values_are_taken_as_they_are() -> None:
    few = RunCurves(metric=Curve(np.array([10.0, 20, 30]), np.array([0.0, 9, 10])), held_out=True)
    assert smoothed(few).tolist() == [0, 9, 10]
    found = measure_run(few, threshold=9.0, kl=math.nan)
    assert found["convergence_step"] == 20 and found["metric_variance"] is None


def test_rewards_are_compared_at_the_kl_that_all_reached() -> None:
    # Both gain 1 over 40 steps; the KL of the one grows to .4, of the other to .8. The first is at KL .4 at
    # its end with 1, the other half way, with 1/2.
    line = np.linspace(0, 1, 41)[1:]
    near = run(line, kl=Curve(STEPS, 0.01 * STEPS))
    far = run(line, kl=Curve(STEPS, 0.02 * STEPS))
    at = matched_kl([near, far, RunCurves()])
    assert at == pytest.approx(0.4)
    assert measure_run(near, threshold=math.nan, kl=at)["at_matched_kl"] == pytest.approx(1)
    assert measure_run(far, threshold=math.nan, kl=at)["at_matched_kl"] == pytest.approx(0.5)
    assert measure_run(run(line), threshold=math.nan, kl=at)["at_matched_kl"] is None
    # First measured at step 20, where the KL is .8 and the line at 1/2. From (0, 1/40), its first value,
    # it is at .4 half way: (1/40 + 1/2)/2.
    late = run(line, kl=Curve(STEPS[19::20], np.array([0.8, 0.9])))
    assert measure_run(late, threshold=math.nan, kl=at)["at_matched_kl"] == pytest.approx(0.525 / 2)


def test_planted_noise_and_slowness_are_seen() -> None:
    calm, noisy, slow = rising(0.3, 0.01), rising(0.3, 0.1), rising(0.1, 0.01)
    threshold = shared_threshold([calm, noisy, slow])
    measured = [measure_run(each, threshold=threshold, kl=0.01) for each in (calm, noisy, slow)]
    found = [{name: value for name, value in each.items() if value is not None} for each in measured]
    for name in ("loss_variance", "metric_variance"):
        assert found[1][name] == pytest.approx(100 * found[0][name], rel=0.5)
    assert found[1]["oscillation"] > found[0]["oscillation"]
    assert found[2]["convergence_step"] > found[0]["convergence_step"]


def test_curves_are_read_between_their_steps() -> None:
    curve = Curve.of([(4, 8.0), (2, 4.0)])
    assert curve.at(3) == 6 and math.isnan(curve.at(1)) and math.isnan(curve.at(math.nan))
    assert len(Curve.of([])) == 0 and math.isnan(Curve.of([]).at(1))


def test_groups_have_interquartile_means_and_say_what_is_missing() -> None:
    # Four seeds: the middle half of 0, 1, 2, 9 is 1 and 2.
    whole = summarise_group([9, 0, 2, 1])
    assert whole.value == 1.5 and whole.low is not None and whole.low < 1.5 < (whole.high or 0)
    part = summarise_group([1.0, None, 3.0])
    assert (part.value, part.low, part.known, part.runs) == (2, None, 2, 3)
    assert summarise_group([4.0]).low is None and summarise_group([None]).value is None


@pytest.mark.slow
def test_more_seeds_narrow_the_interval() -> None:
    def width(count: int) -> float:
        scores = np.random.default_rng(0).normal(size=(40, count))
        found = [summarise_group(row.tolist()) for row in scores]
        return float(np.mean([(each.high or 0) - (each.low or 0) for each in found]))

    assert width(4) / width(16) == pytest.approx(2, rel=0.2)  # as 1/sqrt(seeds)


def test_pairs_of_groups() -> None:
    groups = {"a": [1.0, 1.1, 0.9, 1.05], "b": [2.0, 2.1, 1.9, 2.05], "c": [5.0]}
    (pair,) = compare_pairs(groups)
    assert (pair.first, pair.second) == ("b", "a") and pair.difference.estimate == pytest.approx(1)
    assert pair.difference.low > 0 and pair.holm < 0.05 and pair.probability.estimate == 1
    (less,) = compare_pairs(groups, lower_is_better=True)
    assert less.first == "a" and less.difference.estimate == pytest.approx(1)
    (alike,) = compare_pairs({"a": [1.0, 1.0], "b": [2.0, 2.0]})
    assert alike.holm == 1 and math.isnan(alike.difference.low)


def test_one_group_without_spread_is_judged_by_the_seeds_of_the_other() -> None:
    # Of 0 and 0.04 the mean is 0.02, its error 0.04/√2/√2 = 0.02; t = (0.16 − 0.02)/0.02 = 7 with one degree
    # of freedom, Cauchy's distribution: p = 1 − 2/π·atan 7 = 0.0903; its quantile of 97.5% is 12.7062.
    (pair,) = compare_pairs({"a": [0.16, 0.16], "b": [0.0, 0.04]})
    assert pair.holm == pytest.approx(1 - 2 / math.pi * math.atan(7), abs=1e-9)
    half = 12.7062 * 0.02
    assert (pair.difference.low, pair.difference.high) == pytest.approx((0.14 - half, 0.14 + half), abs=1e-5)
    # Of 1, 2 and 3 the error is 1/√3; t = 2√3 with two degrees: p = 1 − t/√(2 + t²) = 1 − √(12/14).
    (three,) = compare_pairs({"a": [4.0, 4.0, 4.0], "b": [1.0, 2.0, 3.0]})
    assert three.holm == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-9)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_groups_that_do_not_differ_are_seldom_told_apart(seeds: int, coarse: bool) -> None:
    rng, wrong = np.random.default_rng(seeds), 0
    for _ in range(200):
        drawn = rng.normal(size=(2, seeds))
        a, b = np.round(2 * drawn) / 2 if coarse else drawn
        (pair,) = compare_pairs({"a": a.tolist(), "b": b.tolist()})
        wrong += pair.difference.excludes(0)
    assert wrong / 200 <= 0.05 + 2 * 0.0154  # two standard errors of the simulation
