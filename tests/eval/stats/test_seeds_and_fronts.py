"""Interquartile means, improvement, Pareto fronts and hypervolumes: by hand and by brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as oracle

from rlhf_eval.stats import hypervolume, iqm, iqm_interval, pareto_front, probability_of_improvement

POINTS = st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=8)


def test_the_interquartile_mean_by_hand_and_as_rliable_has_it() -> None:
    assert iqm([0, 1, 2, 100]) == 1.5
    scores = np.random.default_rng(0).normal(0, 1, (10, 7))
    # rliable.metrics.aggregate_iqm is scipy's trimmed mean with a quarter cut off at both ends.
    assert iqm(scores) == pytest.approx(oracle.trim_mean(scores.ravel(), 0.25))


def test_intervals_shrink_with_runs() -> None:
    rng = np.random.default_rng(1)
    widths = {}
    for runs in (10, 160):
        found = [iqm_interval(rng.normal(0, 1, (runs, 20)), resamples=200) for _ in range(8)]
        widths[runs] = np.mean([each.high - each.low for each in found])
    assert widths[10] / widths[160] == pytest.approx(4, rel=0.15)
    wider = iqm_interval(rng.normal(0, 1, (10, 20)), resample_prompts=True, resamples=200)
    assert wider.high - wider.low > widths[10]
    with pytest.raises(ValueError):
        iqm_interval([[1.0, 2.0]])


def test_probability_of_improvement_by_hand() -> None:
    # Pairs of runs: (2, 1) won, (2, 3) lost, (3, 1) won, (3, 3) a tie.
    assert probability_of_improvement([2, 3], [1, 3]).estimate == pytest.approx(2.5 / 4)
    same = np.random.default_rng(2).normal(0, 1, (5, 4))
    assert probability_of_improvement(same, same).estimate == 0.5
    with pytest.raises(ValueError):
        probability_of_improvement(same, same[:, :3])


def test_a_front_by_hand() -> None:
    # (reward, −KL): the third is worse than the first in both, the last equals the second.
    assert pareto_front([(1, -1), (2, -3), (0.5, -2), (2, -3)]) == [0, 1, 3]
    # Boxes above (0, −4): 1 × 3 and 2 × 1, sharing 1 × 1.
    assert hypervolume([(1, -1), (2, -3)], (0, -4)) == 4
    assert hypervolume([(1, -5)], (0, -4)) == 0
    with pytest.raises(ValueError):
        hypervolume([(1, 1)], (0, 0, 0))


@settings(deadline=None)
@given(POINTS)
def test_fronts_and_volumes_by_counting_cells(points: list[tuple[int, int, int]]) -> None:
    cells = product(range(6), repeat=3)
    covered = sum(
        any(all(c < p for c, p in zip(cell, point, strict=True)) for point in points) for cell in cells
    )
    assert hypervolume(points, (0, 0, 0)) == covered
    front = pareto_front(points)
    assert hypervolume([points[i] for i in front], (0, 0, 0)) == covered
    beaten = [any(q != p and all(b >= a for a, b in zip(p, q, strict=True)) for q in points) for p in points]
    assert front == [i for i, lost in enumerate(beaten) if not lost]
