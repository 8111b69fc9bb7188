"""Logistic models: golden values, agreement with other solvers, and intervals that cover where nothing is."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from rlhf_eval.exploration.logistic import (
    Design,
    SparseRows,
    fit_pairs,
    fit_with_errors,
    probability_of_chosen,
)
from rlhf_eval.exploration.phrases import log_odds


def sparse_of(matrix: np.ndarray) -> SparseRows:
    rows, columns = np.nonzero(matrix)
    return SparseRows(rows, columns, matrix[rows, columns].astype(float), matrix.shape)


def test_one_feature_by_hand():
    # 3 of 4 pairs have x = 1, the other −1: without penalty σ(w) = 3/4, w = log 3.  With one the gradient
    # 3 (1 − σ) − σ = w is zero at w = 0.5052.
    x = np.array([[1.0], [1], [1], [-1]])
    (weight,), (error,) = fit_with_errors(x, np.arange(4))
    assert 3 * (1 - probability_of_chosen(weight)) - probability_of_chosen(weight) == pytest.approx(weight)
    assert weight == pytest.approx(0.5052, abs=1e-4)
    # σ = .6237 and H = 4 σ(1 − σ) + 1 = 1.939, so 1/√H = .7182; the robust error is smaller,
    # √((3 · .3763² + .6237²) · 4/3) / H = .537.
    assert error == pytest.approx(0.7182, abs=1e-4)


def test_both_solvers_and_scipy_agree():
    rng = np.random.default_rng(0)
    dense, sparse = (
        rng.normal(size=(300, 3)),
        rng.choice([-1.0, 0, 0, 0, 1], (300, 5)),
    )
    whole = np.concatenate([dense, sparse], axis=1)
    keep = rng.random(300) < probability_of_chosen(whole @ rng.normal(size=8))
    whole = np.where(keep[:, None], whole, -whole)
    found = fit_pairs(Design(whole[:, :3], sparse_of(whole[:, 3:])))
    # The same penalty: a sparse column counts 10 times as much, as one that is √10 times smaller does.
    scaled = whole / np.repeat([1, np.sqrt(10)], [3, 5])

    def objective(weights):
        return np.logaddexp(0, -scaled @ weights).sum() + weights @ weights / 2

    expected = minimize(objective, np.zeros(8)).x / np.repeat([1, np.sqrt(10)], [3, 5])
    assert found == pytest.approx(expected, abs=2e-3)
    assert fit_with_errors(dense, np.arange(300))[0] == pytest.approx(fit_pairs(Design(dense)), abs=1e-3)


def test_sparse_rows_are_the_matrix():
    rng = np.random.default_rng(1)
    matrix = (rng.random((20, 7)) < 0.3) * rng.normal(size=(20, 7))
    rows, chosen = sparse_of(matrix), np.array([2, 3, 11, 19])
    assert rows.dot(np.arange(7.0)) == pytest.approx(matrix @ np.arange(7.0))
    assert rows.transposed_dot(np.arange(20.0)) == pytest.approx(matrix.T @ np.arange(20.0))
    assert rows.take(chosen).dot(np.ones(7)) == pytest.approx(matrix[chosen] @ np.ones(7))


def test_pairs_of_one_prompt_are_one_witness():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(100, 2))
    _, alone = fit_with_errors(np.repeat(x, 5, axis=0), np.arange(500))
    _, together = fit_with_errors(np.repeat(x, 5, axis=0), np.repeat(np.arange(100), 5))
    assert together == pytest.approx(alone * np.sqrt(5), rel=0.05)


def coverage(pairs: int, runs: int) -> float:
    """Share of 95% intervals of a weight of 0 that hold it; rows come three to a prompt."""
    rng, inside = np.random.default_rng(3), 0
    for _ in range(runs):
        prompts = np.arange(pairs) // 3
        shared = rng.normal(size=(prompts.max() + 1, 2))[prompts] * 0.7
        x = (shared + rng.normal(size=(pairs, 2))) * rng.choice([-1, 1], prompts.max() + 1)[prompts, None]
        weights, errors = fit_with_errors(x, prompts)
        inside += int((np.abs(weights) <= 1.96 * errors).sum())
    return inside / (2 * runs)


def test_intervals_of_no_effect_hold_it():
    assert 0.92 <= coverage(300, 150) <= 0.99  # 300 intervals: two standard errors are .025


def test_log_odds_by_hand():
    # 20 of 100 against 10 of 100; of all phrases there are 200: α = 500 · 30/200 = 75, β = 500 · 170/200.
    delta, z = log_odds(np.array([20, 80]), np.array([10, 90]), total=200, pairs=100)
    expected = np.log((20 + 75) / (80 + 425)) - np.log((10 + 75) / (90 + 425))
    assert delta[0] == pytest.approx(expected) and delta[0] == pytest.approx(-delta[1])
    assert z[0] == pytest.approx(expected / np.sqrt(1 / 95 + 1 / 505 + 1 / 85 + 1 / 515))


def test_what_both_sides_say_as_often_says_nothing():
    delta, z = log_odds(np.array([100, 40]), np.array([100, 40]), total=7_000, pairs=100)
    assert delta.tolist() == z.tolist() == [0, 0]
    _, z = log_odds(np.array([99]), np.array([97]), total=7_000, pairs=100)
    assert abs(z[0]) < 1.96  # two completions more of a hundred are chance
