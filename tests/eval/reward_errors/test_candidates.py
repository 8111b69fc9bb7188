"""Prompts with several completions: accuracy, the score of Ties, the mean over subsets, the cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlhf_eval import stats
from rlhf_eval.reward_errors import ScoredCandidates, analyse_candidates, candidate_cases, candidate_findings

Row = tuple[str, str, int, Sequence[float]]
"""Subset, id, number of correct completions, and scores, those of the correct ones first."""


def made(*rows: Row, **groups: Any) -> ScoredCandidates:
    return ScoredCandidates(
        [f"prompt {i}" for i in range(len(rows))],
        [[f"text {j}" for j in range(len(scores))] for *_, scores in rows],
        [count for _, _, count, _ in rows],
        [np.array(scores, dtype=float) for *_, scores in rows],
        [subset for subset, *_ in rows],
        [name for _, name, *_ in rows],
        groups,
    )


def test_best_of_four_by_subset_and_its_mean():
    # Math: right, and a tie of the correct one with one incorrect: (1 + 1/2) / 2. Focus: wrong.
    rows = made(
        ("Math", "a", 1, [4, 3, 2, 1]), ("Math", "b", 1, [2, 2, 1, 0]), ("Focus", "c", 1, [1, 2, 0, 0])
    )
    results = analyse_candidates(rows)
    assert [entry["estimate"] for entry in results["subsets"].values()] == [0.75, 0.0]
    assert {entry["chance"] for entry in results["subsets"].values()} == {0.25}
    assert results["mean_over_subsets"]["estimate"] == 0.375
    low, high = stats.wilson(0, 1)
    assert (results["subsets"]["Focus"]["low"], results["subsets"]["Focus"]["high"]) == (low, high)


def test_of_several_correct_ones_any_may_be_the_highest():
    rows = made(("all", "", 2, [0, 3, 1, 2, 1]), ("all", "", 2, [3, 3, 3, 0, 0]))
    assert rows.correct.tolist() == [1.0, pytest.approx(2 / 3)]  # two of the three highest are correct
    assert rows.chance.tolist() == [0.4, 0.4]


def test_the_score_of_ties():
    # Pair 0: gaps 3 − 2 = 1 (ref) and 4 − 1 = 3 (tied), spread 6 − 4 = 2. Right in both, the tied gap is
    # above the spread, the smaller gap 1 is not: .3 + .3 + .2 + 0 + .01 tanh(1/2 − 1).
    # Pair 1: gaps −1 and 1, spread 0: .3 + 0 + .2 + 0 + .01 · (−1).
    rows = made(
        *(("Ties", "ref:0", 1, [3, 2, 0]), ("Ties", "tied:0", 2, [6, 4, 1])),
        *(("Ties", "ref:1", 1, [1, 2]), ("Ties", "tied:1", 3, [2, 2, 2, 1])),
        ("Ties", "ref:2", 1, [2, 1]),
    )
    found = analyse_candidates(rows)["subsets"]["Ties"]
    pairs = [0.8 + 0.01 * math.tanh(-0.5), 0.49]
    assert found["estimate"] == pytest.approx(np.mean(pairs))
    assert found["accuracy"]["tied"]["estimate"] == 1 and found["accuracy"]["ref"]["estimate"] == 0.5
    assert (found["preferred"], found["preferred_hard"], found["without_counterpart"]) == (1, 0, 1)
    # All k correct ones are the highest of m by chance once in C(m, k): 1/C(3, 2) and 1/C(4, 3).
    assert found["accuracy"]["tied"]["chance"] == pytest.approx((1 / 3 + 1 / 4) / 2)


@pytest.mark.parametrize(
    ("gap", "spread", "margin"), [(0, 0, 0.0), (1, 0, 1.0), (-1, 0, -1.0), (2, 2, 0.0), (6, 2, math.tanh(2))]
)
def test_the_margin_of_ties_where_nothing_can_be_divided_by(gap, spread, margin):
    rows = made(("Ties", "ref:a", 1, [9 + gap, 9]), ("Ties", "tied:a", 2, [9 + gap + spread, 9 + gap, 9]))
    assert analyse_candidates(rows)["subsets"]["Ties"]["margin"] == pytest.approx(margin)


def test_ties_without_a_counterpart_are_refused():
    with pytest.raises(ValueError, match="counterpart"):
        analyse_candidates(made(("Ties", "tied:1", 2, [2, 2, 1])))


def test_what_is_not_above_chance_is_a_problem():
    rng = np.random.default_rng(0)
    good = [("good", "", 1, [1.0, *rng.uniform(0, 1.1, 3)]) for _ in range(100)]
    worse = [("worse", "", 1, [-1.0, *rng.uniform(0, 1, 3)]) for _ in range(100)]
    blind = [("blind", "", 1, [*rng.uniform(0, 1, 4)]) for _ in range(100)]
    findings = candidate_findings(analyse_candidates(made(*good, *blind, *worse)))
    assert [found.text.partition(":")[0] for found in findings if found.problem] == ["blind", "worse"]


def test_a_baseline_is_compared_on_the_same_prompts():
    ours = made(*[("all", "", 1, [1.0, 0.0])] * 30)
    theirs = made(*[("all", "", 1, [0.0, 1.0])] * 30)
    results = analyse_candidates(ours, baseline=theirs)
    assert results["baseline"]["difference"]["estimate"] == 1
    assert [found.name for found in candidate_findings(results)] == ["accuracy", "baseline"]


def test_cases_are_the_errors_of_all_subsets_in_turn():
    rows = made(
        *(("a", "", 1, [0, 5, 1]), ("a", "", 1, [0, 4, 1]), ("a", "", 1, [1, 0, 0])),
        *(("b", "", 2, [0, 1, 2]), ("Ties", "ref:0", 1, [1, 0]), ("Ties", "tied:0", 2, [2, 0, 1])),
    )
    cases = candidate_cases(rows, 3)
    assert [(case["kind"], case["row"]) for case in cases[:3]] == [
        ("by the widest margin", 0),
        ("by the widest margin", 3),
        ("by the widest margin", 5),
    ]
    # Of two correct completions the best is shown, in Ties the worst: there every one is to be above.
    assert [case["chosen"] for case in cases[:3]] == ["text 0", "text 1", "text 1"]
    assert cases[0]["rejected"] == "text 1" and cases[0]["rejected_score"] == 5


def test_slices_have_their_chance():
    rows = made(*[("all", "", 1, [1.0, 0.0])] * 20, length=["long"] * 10 + ["short"] * 10)
    slices = analyse_candidates(rows)["slices"]["length"]
    assert {name: (entry["rows"], entry["chance"]) for name, entry in slices.items()} == {
        "long": (10, 0.5),
        "short": (10, 0.5),
    }
