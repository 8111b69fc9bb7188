"""Win rates, position bias and strengths: by hand, against choix, and planted values found again."""

from __future__ import annotations

import math

import choix
import numpy as np
import pytest

from rlhf_eval.stats import bradley_terry, position_bias, win_rate


def test_ties_count_half_and_a_prompt_once() -> None:
    found = win_rate([1, 0.5, 0, 1])
    assert found.estimate == pytest.approx(2.5 / 4) and found.unit == "prompt"
    both = win_rate([1, 1, 0, 1], [0, 1, 0, 1])
    assert both.estimate == pytest.approx(2.5 / 4) and both.n == 4
    with pytest.raises(ValueError):
        win_rate([1, 0], [1])


def test_two_games_of_a_prompt_are_not_two_prompts() -> None:
    wins = np.array([1.0] * 60 + [0.0] * 40)
    once, twice = win_rate(wins), win_rate(np.tile(wins, 2), prompts=np.tile(np.arange(100), 2))
    assert (twice.low, twice.high) == pytest.approx((once.low, once.high), abs=1e-3)


def test_a_planted_win_probability_is_covered() -> None:
    rng = np.random.default_rng(0)
    found = [win_rate((rng.random(120) < 0.6) * 1.0) for _ in range(500)]
    assert np.mean([each.low <= 0.6 <= each.high for each in found]) >= 0.93


def test_a_planted_position_bias_is_found_and_cancels() -> None:
    rng = np.random.default_rng(1)
    better = rng.random(4000) < 0.6
    lazy = rng.random(4000) < 0.3  # of the prompts, the judge takes what it reads first
    first, second = np.where(lazy, 1, better), np.where(lazy, 0, better)
    found = position_bias(first, second)
    assert found.bias.low <= 0.15 <= found.bias.high and found.bias.excludes(0)
    assert found.first_wins.estimate == pytest.approx(0.5 + found.bias.estimate)
    assert found.consistency.low <= 0.7 <= found.consistency.high
    # One order says .6 + .3 * .4 = .72; both say .6 * .7 + .5 * .3 = .57: lazy verdicts count as ties.
    assert win_rate(first).estimate == pytest.approx(0.72, abs=0.02)
    assert win_rate(first, second).estimate == pytest.approx(0.57, abs=0.02)


def test_an_unbiased_judge_has_none() -> None:
    verdicts = np.random.default_rng(2).integers(0, 2, 300)
    found = position_bias(verdicts, verdicts)
    assert found.bias.estimate == 0 and found.consistency.estimate == 1


def test_strengths_are_choix_s() -> None:
    rng = np.random.default_rng(3)
    truth = np.array([1.0, 0.3, -0.2, -1.1])
    games = []
    for _ in range(400):
        i, j = rng.choice(4, 2, replace=False)
        games.append((int(i), int(j), float(rng.random() < 1 / (1 + math.exp(truth[j] - truth[i])))))
    found = bradley_terry(games, 4, resamples=200)
    wins = [(i, j) if won else (j, i) for i, j, won in games]
    expected = choix.opt_pairwise(4, wins, alpha=0.01 / 2)  # its penalty is alpha·Σθ², ours half of .01·Σθ²
    assert [each.estimate for each in found] == pytest.approx(expected - expected.mean(), abs=1e-4)
    assert all(each.low <= value <= each.high for each, value in zip(found, truth, strict=True))


def test_a_model_that_never_lost_is_finite_and_ties_say_equal() -> None:
    found = bradley_terry([(0, 1, 1.0)] * 10, 2, resamples=50)
    assert math.isfinite(found[0].high) and found[0].estimate > 1
    assert bradley_terry([(0, 1, 0.5)] * 10, 2, resamples=50)[0].estimate == pytest.approx(0)
    with pytest.raises(ValueError):
        bradley_terry([(0, 2, 1.0)], 2)
