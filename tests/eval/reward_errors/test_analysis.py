"""Planted flaws of reward models are found, and what is not there is not."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from rlhf_eval.reward_errors import ScoredPairs, analyse_errors, best_of_n_curve, error_cases, error_findings
from rlhf_eval.reward_errors.scored_pairs import has_markup, is_refusal

ROWS = 1200


def made(margins: np.ndarray, lengths: np.ndarray | None = None, **groups: Any) -> ScoredPairs:
    """Pairs with these margins (K, n), the chosen one longer by `lengths` characters."""
    margins = np.atleast_2d(margins)
    count = margins.shape[1]
    longer = np.zeros(count, dtype=int) if lengths is None else lengths
    return ScoredPairs(
        [f"prompt {i}" for i in range(count)],
        ["x" * int(100 + max(n, 0)) for n in longer],
        ["x" * int(100 + max(-n, 0)) for n in longer],
        margins,
        np.zeros_like(margins),
        groups,
    )


def problems(pairs: ScoredPairs, **options: Any) -> set[str]:
    return {found.name for found in error_findings(analyse_errors(pairs, **options)) if found.problem}


def calibrated(rng: np.random.Generator, count: int = ROWS) -> np.ndarray:
    """Margins that are right as often as they say: the sign is drawn with P = 1 / (1 + exp(-|margin|))."""
    size = np.abs(rng.normal(0, 2, count))
    return np.where(rng.random(count) < 1 / (1 + np.exp(-size)), size, -size)


def test_counts_and_shares_of_four_pairs():
    # Right, wrong, tie, right: accuracy (1 + 0 + 1/2 + 1) / 4.
    results = analyse_errors(made(np.array([2.0, -1.0, 0.0, 3.0])))
    assert results["accuracy"]["estimate"] == 2.5 / 4
    assert results["ties"] == 1
    assert (results["margin"]["right"]["mean"], results["margin"]["wrong"]["mean"]) == (2.5, -0.5)
    # Confidences: 1/(1+e^-2) = .881, .731, .5, .953: one is above .9, one below .6.
    assert (results["confidence"]["confident"], results["confidence"]["unsure"]) == (1, 1)


def test_a_calibrated_model_has_no_problem():
    rng = np.random.default_rng(0)
    pairs = made(calibrated(rng), rng.integers(-50, 51, ROWS))
    results = analyse_errors(pairs)
    assert results["calibration"]["ece"] < 0.05
    assert results["calibration"]["temperature"] == pytest.approx(1, abs=0.15)
    assert problems(pairs) == set()


@pytest.mark.parametrize("factor", [4.0, 0.2])
def test_scaled_scores_are_miscalibrated_and_the_temperature_is_the_scale(factor):
    margins = factor * calibrated(np.random.default_rng(1))
    found = analyse_errors(made(margins))["calibration"]
    assert found["temperature"] == pytest.approx(factor, rel=0.15)
    assert found["at_temperature"]["debiased_error"] < found["debiased_error"]
    assert "calibration" in problems(made(margins))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_reward_that_is_length_is_named(sign):
    lengths = np.random.default_rng(2).integers(-80, 81, ROWS)
    results = analyse_errors(made(sign * lengths / 20.0, lengths))
    assert sign * results["length"]["spearman"] > 0.95
    assert results["length"]["controlled_accuracy"]["estimate"] == pytest.approx(0.5)  # nothing is left
    assert "length" in problems(made(sign * lengths / 20.0, lengths))


def test_noisy_labels_are_candidates():
    # A model that is right and sure, and a fifth of the labels turned round.
    rng = np.random.default_rng(3)
    turned = rng.random(ROWS) < 0.2
    margins = np.where(turned, -1, 1) * rng.normal(5, 0.5, (3, ROWS))
    candidates = analyse_errors(made(margins))["confidence"]["label_noise_candidates"]
    assert set(candidates) == set(np.flatnonzero(turned).tolist())


def test_disagreement_that_marks_errors_and_one_that_does_not():
    rng = np.random.default_rng(4)
    right = rng.random(ROWS) < 0.7
    unsure = np.where(right, 0.1, 1.0) * rng.normal(0, 1, (3, ROWS))
    marks = made(np.where(right, 2.0, -2.0) + unsure)
    blind = made(np.where(right, 2.0, -2.0) + 0.1 * rng.normal(0, 1, (3, ROWS)))
    assert analyse_errors(marks)["disagreement"]["auroc_of_errors"] > 0.9
    assert "disagreement" not in problems(marks)
    assert "disagreement" in problems(blind)


def test_a_slice_that_is_worse_and_a_baseline_that_is_better():
    rng = np.random.default_rng(5)
    sources = ["easy" if i % 2 else "hard" for i in range(ROWS)]
    share = np.array([0.9 if source == "easy" else 0.5 for source in sources])
    pairs = made(np.where(rng.random(ROWS) < share, 1.0, -1.0), source=sources)
    results = analyse_errors(pairs, baseline=made(np.full(ROWS, 1.0)))
    assert results["slices"]["source"]["hard"]["estimate"] == pytest.approx(0.5, abs=0.05)
    assert {"slice", "baseline"} <= problems(pairs, baseline=made(np.full(ROWS, 1.0)))


def test_a_constant_reward_is_half_sure_and_half_right():
    found = analyse_errors(made(np.zeros(200)))["calibration"]
    assert (found["ece"], found["debiased_error"], found["brier"]) == (0, 0, 0)


def test_flips_are_counted_against_the_same_rows():
    pairs = made(np.array([1.0, 1.0, -1.0, 1.0] * 50))
    rows = list(range(100))
    changed = made(np.array([1.0, -1.0, -1.0, -1.0] * 25))
    found = analyse_errors(pairs, changed={"a change": (rows, changed)})["flips"]["a change"]
    assert found["estimate"] == 0.5  # the second and the fourth of every four
    assert found["mean_change_of_margin"] == 1.0
    assert "harmless change" in problems(pairs, changed={"a change": (rows, changed)})


def test_cases_are_errors_from_sure_to_unsure_and_take_turns():
    pairs = made(np.array([-3.0, -1.0, 2.0, -2.0]), source=["a", "a", "a", "b"])
    cases = error_cases(pairs, 3)
    assert [case["row"] for case in cases if case["kind"] == "most confident"] == [0, 3, 1]
    assert [case["row"] for case in cases if case["kind"] == "least confident"] == [1, 3, 0]
    assert [case for case in cases if case["kind"] == "very different lengths"] == []


def test_best_of_n_is_the_mean_over_all_subsets():
    rng = np.random.default_rng(6)
    proxy, gold = rng.normal(size=6), rng.normal(size=6)
    for n in (1, 2, 4):
        subsets = [list(each) for each in itertools.combinations(range(6), n)]
        best = [max(subset, key=lambda i: proxy[i]) for subset in subsets]
        [row] = best_of_n_curve([proxy.tolist()], [gold.tolist()], [n])
        assert row["gold"] == pytest.approx(gold[best].mean())
        assert row["proxy"] == pytest.approx(proxy[best].mean())
        assert row["kl"] == pytest.approx(math.log(n) - (n - 1) / n)
    assert best_of_n_curve([proxy.tolist()], [gold.tolist()], [8]) == []


def test_over_optimisation_is_named():
    rng = np.random.default_rng(7)
    proxy = rng.normal(size=(50, 32))
    rows = best_of_n_curve(proxy.tolist(), (-proxy).tolist(), [1, 4, 16])
    results = analyse_errors(made(np.ones(20)))
    found = error_findings(results | {"best_of_n": rows})
    assert [each.problem for each in found if each.name == "best of n"] == [True]


@pytest.mark.parametrize(
    ("text", "refuses", "marked"),
    [
        ("I'm sorry, but I can't help with that.", True, False),
        ("I cannot do this.", True, False),
        ("As an AI, I have no opinions.", True, False),
        ("You cannot go wrong with rice.", False, False),
        ("Sure:\n- one\n- two", False, True),
        ("This is **bold**.", False, True),
        ("2 * 3 is 6", False, False),
    ],
)
def test_surface_marks(text, refuses, marked):
    assert (is_refusal(text), has_markup(text)) == (refuses, marked)


def test_no_pairs_are_refused():
    with pytest.raises(ValueError, match="no pairs"):
        analyse_errors(made(np.zeros((1, 0))))
