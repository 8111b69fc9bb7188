"""Length-controlled win rates: against scipy, planted biases, and AlpacaEval 2's published figures."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from rlhf_eval.stats import (
    alpaca_eval_win_rate,
    controlled_win_rate,
    length_feature,
    style_counts,
    style_features,
    win_rate,
)

DATA = Path(__file__).parents[4] / "shared" / "data" / "alpaca_eval"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the AlpacaEval files are not there")
MODELS = ("vicuna-7b", "alpaca-farm-ppo-human", "gpt-3.5-turbo-1106")


def rows_of(model: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{model}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def judged(model: str) -> tuple[np.ndarray, list[int], list[int]]:
    """Probability that the model wins, and the characters of its outputs and of the baseline's."""
    baseline = {row["instruction"]: len(row["output"]) for row in rows_of("gpt4_1106_preview")}
    rows = rows_of(model)
    verdicts = np.array([row["preference"] or 1.5 for row in rows]) - 1  # 0 is a tie
    return verdicts, [len(row["output"]) for row in rows], [baseline[row["instruction"]] for row in rows]


def test_a_planted_length_bias_is_found_and_taken_out() -> None:
    rng = np.random.default_rng(0)
    longer = np.tanh(rng.normal(1, 1, 3000))  # the model writes more, and is no better
    wins = (rng.random(3000) < 1 / (1 + np.exp(-2 * longer))) * 1.0
    assert win_rate(wins).low > 0.6
    found = controlled_win_rate(wins, longer, refits=300)
    assert found.win_rate.low <= 0.5 <= found.win_rate.high
    assert found.effects[0].low <= 2 <= found.effects[0].high and found.effects[0].excludes(0)


def test_the_fit_is_scipy_s() -> None:
    rng = np.random.default_rng(1)
    features = rng.normal(0, 1, (300, 2))
    wins = rng.random(300) < 1 / (1 + np.exp(-(0.4 + features @ [1.0, -0.5])))
    found = controlled_win_rate(wins * 1.0, features, refits=50)
    signed = np.where(wins, 1, -1)[:, None] * np.column_stack([np.ones(300), features])
    intercept, *weights = minimize(lambda w: np.logaddexp(0, -signed @ w).sum(), np.zeros(3)).x
    assert found.win_rate.estimate == pytest.approx(1 / (1 + np.exp(-intercept)), abs=1e-4)
    assert [each.estimate for each in found.effects] == pytest.approx(weights, abs=1e-3)


def test_equal_lengths_leave_the_win_rate_alone() -> None:
    verdicts = [1, 0, 0.5, 1, 1, 0]
    assert length_feature([3] * 6, [3] * 6).tolist() == [0] * 6
    found = controlled_win_rate(verdicts, np.zeros(6), refits=50)
    assert found.win_rate.estimate == pytest.approx(3.5 / 6, abs=1e-3)
    with pytest.raises(ValueError):
        controlled_win_rate(verdicts, np.zeros(5))
    with pytest.raises(ValueError):
        controlled_win_rate([2], [0])


def test_the_length_feature_by_hand() -> None:
    # Differences 2 and −2 have the standard deviation √8 (n − 1).
    assert length_feature([5, 1], [3, 3]) == pytest.approx(np.tanh([2 / 8**0.5, -2 / 8**0.5]))


def test_style_by_hand() -> None:
    assert style_counts("# Title\n\n- one\n- **two**\n\n1. three\n\nnot # a title") == (1, 3, 1)
    assert style_features(["- a\n- b"], ["plain"]).tolist() == [[0, 2 / 3, 0]]


@needs_data
@pytest.mark.parametrize("model", MODELS)
def test_win_rate_and_standard_error_are_those_published(model: str) -> None:
    published = json.loads((DATA / "published.json").read_text())[model]
    found = win_rate(judged(model)[0])
    assert 100 * found.estimate == pytest.approx(published["win_rate"], abs=0.01)
    assert found.standard_error is not None
    assert 100 * found.standard_error == pytest.approx(published["standard_error"], abs=0.01)


@needs_data
@pytest.mark.parametrize(
    ("model", "plain", "regularised"),
    list(zip(MODELS, (9.28, 9.90, 37.80), (8.81, 9.21, 28.67), strict=True)),
)
def test_length_control_of_real_verdicts(model: str, plain: float, regularised: float) -> None:
    """Nearer to what is published with the baseline's rows; the rest is the instructions' difficulty."""
    published = json.loads((DATA / "published.json").read_text())[model]["length_controlled_winrate"]
    verdicts, lengths, baseline = judged(model)
    ours = controlled_win_rate(verdicts, length_feature(lengths, baseline), refits=200).win_rate
    theirs = alpaca_eval_win_rate(verdicts, lengths, baseline, refits=200)
    assert 100 * ours.estimate == pytest.approx(plain, abs=0.05)
    assert 100 * theirs.estimate == pytest.approx(regularised, abs=0.05)
    assert published < 100 * theirs.estimate < 100 * ours.estimate
    assert theirs.low < theirs.estimate < theirs.high


def test_difficulty_changes_what_the_intercept_means() -> None:
    rng = np.random.default_rng(2)
    hard = rng.normal(0, 2, 4000)
    shorter = rng.normal(0.8, 1, 4000)
    slope = -1.61 * np.tanh(shorter / shorter.std(ddof=1))
    wins = (rng.random(4000) < 1 / (1 + np.exp(-(-2 + hard + slope)))) * 1.0
    truth = 100 * np.mean(1 / (1 + np.exp(-(-2 + hard))))
    zero = np.zeros(4000)
    with_it = alpaca_eval_win_rate(wins, -shorter, zero, difficulty=hard, refits=100)
    without = alpaca_eval_win_rate(wins, -shorter, zero, refits=1)
    assert 100 * with_it.estimate == pytest.approx(truth, abs=2)
    assert abs(100 * without.estimate - truth) > abs(100 * with_it.estimate - truth)
