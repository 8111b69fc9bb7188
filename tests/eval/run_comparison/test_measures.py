"""Golden values and properties of what is measured of a curve."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_eval.run_comparison import final_mean
from rlhf_eval.run_comparison.measures import (
    at_kl,
    convergence_threshold,
    detrended_variance,
    first_held,
    oscillation,
    running_mean,
    running_median,
)

numbers = st.floats(-1e3, 1e3)
curves = st.lists(numbers, min_size=1, max_size=60)


def test_windows_shrink_evenly_towards_the_ends() -> None:
    values = [0, 0, 9, 0, 3]
    # Windows of 3: 0 | 0 0 9 | 0 9 0 | 9 0 3 | 3.
    assert running_mean(values, 3) == pytest.approx([0, 3, 3, 4, 3])
    assert running_median(values, 3) == pytest.approx([0, 0, 0, 3, 3])
    # Windows of 5 have one value at the ends and three beside them: the ends are the values themselves.
    assert running_mean(values, 5) == pytest.approx([0, 3, 12 / 5, 4, 3])


@settings(deadline=None)
@given(st.integers(1, 40), numbers, numbers)
def test_straight_lines_stay_what_they_are(count: int, start: float, slope: float) -> None:
    line = start + slope * np.arange(count)
    assert running_mean(line) == pytest.approx(line, abs=1e-6)
    assert running_median(line) == pytest.approx(line, abs=1e-6)


def test_the_variance_is_of_what_the_trend_leaves() -> None:
    # A line is all trend. A level with one jump keeps its median, so that the jump alone is left.
    line = np.arange(22.0)
    assert detrended_variance(line) == pytest.approx(0)
    level = np.zeros(22)
    level[17] = 6
    # Ten residuals of 0 and one of 6: mean 6/11, variance 36/11 - 36/121 = 360/121.
    assert detrended_variance(level) == pytest.approx(360 / 121)
    level[3] = 100  # in the first half, where the run is still learning
    assert detrended_variance(level) == pytest.approx(360 / 121)
    assert math.isnan(detrended_variance(np.arange(10.0)))


@settings(deadline=None)
@given(st.lists(numbers, min_size=11, max_size=60), numbers, st.floats(0.1, 10))
def test_the_variance_does_not_see_the_level_and_scales_with_the_square(values, shift, scale) -> None:
    plain = detrended_variance(values)
    assert detrended_variance(np.array(values) + shift) == pytest.approx(plain, rel=1e-6, abs=1e-6)
    assert detrended_variance(scale * np.array(values)) == pytest.approx(scale**2 * plain, rel=1e-6, abs=1e-6)


def test_oscillation() -> None:
    # Up 3, down 1, up 2: 6 travelled, 4 ahead.
    assert oscillation([0, 3, 2, 4]) == pytest.approx(1.5)
    assert oscillation([4, 2, 1]) == oscillation([0, 1, 5]) == 1
    assert math.isnan(oscillation([1, 2, 1])) and math.isnan(oscillation([]))
    assert oscillation([1e-309, 1, 0]) == math.inf  # too far for a float, and no warning


@settings(deadline=None)
@given(st.lists(numbers, min_size=2, max_size=40))
def test_nobody_travels_less_than_the_way(values: list[float]) -> None:
    found = oscillation(values)
    assert math.isnan(found) or found >= 1 - 1e-9
    assert np.array_equal(oscillation(values[::-1]), found, equal_nan=True) or oscillation(
        values[::-1]
    ) == pytest.approx(found)


def test_the_end_is_the_last_tenth() -> None:
    assert final_mean(range(20)) == 18.5  # of 18 and 19
    assert final_mean(range(21)) == 19  # three of 21: 18, 19, 20
    assert final_mean([7]) == 7 and math.isnan(final_mean([]))


def test_the_threshold_is_nine_tenths_of_the_way() -> None:
    # The start is (0 + 1)/2, the best end 5.5: 0.5 + 0.9 * 5.
    assert convergence_threshold([0, 1], [3, 5.5]) == pytest.approx(5)
    assert math.isnan(convergence_threshold([2, 2], [2, 1]))


def test_a_threshold_must_be_held() -> None:
    curve = [0, 5, 5, 1, 5, 6, 7, 5, 5, 0]
    assert first_held(curve, 5, hold=2) == 1
    assert first_held(curve, 5) == 4  # index 1 is held for two values only; indices 4 to 8 are five
    assert first_held(curve, 5, hold=6) is None
    assert first_held([9, 9, 9, 9], 5) is None  # ends before it was held
    assert first_held([9] * 5, math.nan) is None


@settings(deadline=None)
@given(curves, numbers, st.integers(1, 6))
def test_what_is_found_is_held_and_the_first(values: list[float], threshold: float, hold: int) -> None:
    naive = next(
        (
            i
            for i in range(len(values) - hold + 1)
            if all(value >= threshold for value in values[i : i + hold])
        ),
        None,
    )
    assert first_held(values, threshold, hold) == naive


def test_the_value_at_a_kl() -> None:
    # From (1, 10) to (3, 20): half way at 2 is 15; what comes later, lower or not, does not count.
    assert at_kl([0, 1, 3, 1, 5], [0, 10, 20, 99, 99], 2) == pytest.approx(15)
    assert at_kl([0, 1], [0, 10], 1) == 10 and at_kl([1, 3], [4, 5], 1) == 4
    assert math.isnan(at_kl([2, 3], [4, 5], 1))  # it begins beyond
    assert math.isnan(at_kl([0, 1], [0, 10], 1.5)) and math.isnan(at_kl([], [], 1))
