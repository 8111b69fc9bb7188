"""Means, differences and rates: values by hand, and what resampling by cluster changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as oracle

from rlhf_eval.stats import (
    exact_proportion,
    mean_interval,
    mean_of_parts,
    non_inferior,
    paired_difference,
    proportion_difference,
    proportion_interval,
    two_sample_difference,
    verdict_difference,
    wilson,
)
from rlhf_eval.stats.interval import MOST_UNITS, Interval, t_quantile, t_two_sided, unit_codes


def test_wilson_by_hand() -> None:
    # p = .5, n = 4, z = 1.96: centre .5; half = 1.96 * sqrt(.0625 + .060025) / (1 + .9604) = .34998
    low, high = wilson(0.5, 4)
    assert low == pytest.approx(0.15004, abs=1e-4) and high == pytest.approx(0.84996, abs=1e-4)
    # Nothing won in n: from 0 to z²/(n + z²).
    assert wilson(0, 10) == pytest.approx((0, 3.8415 / 13.8415), abs=1e-4)
    assert all(math.isnan(end) for end in wilson(0.5, 0))


@pytest.mark.parametrize(("wins", "n"), [(3, 40), (20, 41), (99, 100)])
def test_wilson_is_scipy_s(wins: int, n: int) -> None:
    expected = oracle.binomtest(wins, n).proportion_ci(method="wilson")
    assert wilson(wins / n, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_a_rate_of_independent_rows_has_wilson_s_interval() -> None:
    rows = [1.0] * 12 + [0.0] * 28
    found = proportion_interval(rows)
    # se² has n − 1 in it, so that the rows are worth n − 1.
    assert (found.low, found.high) == pytest.approx(wilson(0.3, 39))
    assert found.standard_error == pytest.approx(np.std(rows, ddof=1) / math.sqrt(40))


def test_rows_of_one_prompt_are_worth_one_row() -> None:
    rows = [1.0, 0.0, 0.0, 1.0, 1.0]
    once, four_times = proportion_interval(rows), proportion_interval(rows * 4, list(range(5)) * 4)
    assert (four_times.low, four_times.high) == pytest.approx((once.low, once.high))
    assert four_times.n == 5


def test_the_standard_error_of_clusters_by_hand() -> None:
    # Clusters (1, 3) and (5): mean 3, sums 4 and 5, sizes 2 and 1, residuals 4 − 6 = −2 and 5 − 3 = 2.
    # se = sqrt(2/1 * (4 + 4)) / 3 = 4/3
    found = mean_interval([1, 3, 5], ["a", "a", "b"])
    assert found.estimate == 3 and found.standard_error == pytest.approx(4 / 3)


def test_a_paired_difference_is_the_mean_of_differences() -> None:
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 10, 200)
    first, second = hard + rng.normal(0.5, 1, 200), hard + rng.normal(0, 1, 200)
    paired, apart = paired_difference(first, second), two_sample_difference(first, second)
    assert paired.estimate == pytest.approx(apart.estimate) == pytest.approx(np.mean(first - second))
    assert paired.excludes(0) and not apart.excludes(0)
    expected = oracle.ttest_rel(first, second)
    assert paired.p_value == pytest.approx(expected.pvalue, abs=0.003)
    ends = expected.confidence_interval()
    assert (paired.low, paired.high) == pytest.approx((ends.low, ends.high), abs=0.03)
    back = paired_difference(second, first)
    assert (back.low, back.high) == pytest.approx((-paired.high, -paired.low), abs=0.01)


def test_p_value_and_interval_agree() -> None:
    rng = np.random.default_rng(1)
    for shift in np.linspace(0, 0.6, 20):
        found = mean_interval(rng.exponential(1, 40) - 1 + shift)
        assert found.p_value is not None
        assert found.excludes(0) == (found.p_value < 0.05)
        verdicts = verdict_difference(rng.choice([-1, 0, 1], 60, p=[0.2, 0.5, 0.3]))
        assert verdicts.p_value is not None
        assert verdicts.excludes(0) == (verdicts.p_value < 0.05)


def test_verdicts_without_a_difference_still_have_an_interval() -> None:
    # No gain and no loss among n = 10: each is at most z²/(n + z²) = .2775.
    found = paired_difference([1, 0] * 5, [1, 0] * 5)
    assert (found.low, found.high) == pytest.approx((-0.27754, 0.27754), abs=1e-4)
    assert found.p_value == pytest.approx(1) and found.estimate == 0


def test_the_interval_of_verdicts_by_hand() -> None:
    # 6 gains, 2 losses of 40: p = .15, q = .05, each worth 39 rows.
    # r = -pq / sqrt(p(1-p) q(1-q)) = -.09637
    gains, losses = wilson(0.15, 39), wilson(0.05, 39)
    r = -0.15 * 0.05 / math.sqrt(0.15 * 0.85 * 0.05 * 0.95)
    below = (0.15 - gains[0], losses[1] - 0.05)
    low = 0.1 - math.sqrt(below[0] ** 2 + below[1] ** 2 - 2 * r * below[0] * below[1])
    found = verdict_difference([1] * 6 + [-1] * 2 + [0] * 32)
    assert found.low == pytest.approx(low, abs=1e-9) and found.estimate == pytest.approx(0.1)


@pytest.mark.parametrize("n", range(2, 8))
def test_few_verdicts_differ_where_the_sign_test_says_so(n: int) -> None:
    found = verdict_difference([1.0] * n)
    exact = oracle.binomtest(n, n).pvalue  # 2 / 2ⁿ: not below 5% before 6 of 6
    assert found.p_value == pytest.approx(exact, rel=0.5)
    assert (found.low > 0) == (exact < 0.05) and found.high == 1
    mirrored = verdict_difference([-1.0] * n)
    assert (mirrored.low, mirrored.high) == (-1, -found.low)
    assert verdict_difference([0.0] * n).p_value == pytest.approx(1)


@pytest.mark.parametrize(
    ("wins", "n", "ends"),
    [
        (81, 263, (0.2535, 0.3682)),
        (15, 148, (0.0598, 0.1644)),
        (0, 20, (0, 0.2005)),
        (1, 29, (0.0018, 0.1963)),
    ],
)
def test_wilson_with_continuity_is_newcombe_s(wins: int, n: int, ends: tuple[float, float]) -> None:
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 4.
    assert wilson(wins / n, n, continuity=True) == pytest.approx(ends, abs=5e-5)


def test_scores_that_all_agree_have_no_interval() -> None:
    found = mean_interval([0.3, 0.3, 0.3])
    assert found.estimate == pytest.approx(0.3) and math.isnan(found.low) and found.p_value is None
    assert math.isnan(mean_interval([]).estimate)
    assert math.isnan(mean_interval([1.0]).high)


def test_units_are_numbered_by_their_first_rows_whatever_names_them() -> None:
    clusters = np.array([7, 3, 7, 9, 3, 0])
    assert unit_codes(clusters, 6).tolist() == unit_codes(clusters.tolist(), 6).tolist() == [0, 1, 0, 2, 1, 3]
    assert unit_codes(np.zeros(0, dtype=int), 0).tolist() == []


def test_many_units_are_grouped_and_the_error_stays() -> None:
    values = np.random.default_rng(2).exponential(1, 4 * MOST_UNITS)
    found = mean_interval(values)
    plain = values.std(ddof=1) / math.sqrt(len(values))
    assert found.n == len(values) and found.standard_error == pytest.approx(plain, rel=0.05)
    assert found.high - found.low == pytest.approx(2 * 1.96 * plain, rel=0.08)


def test_non_inferiority_is_about_the_lower_end() -> None:
    found = Interval(-0.01, -0.03, 0.01, 0.95, "", "row", 100)
    assert non_inferior(found, 0.04) and not non_inferior(found, 0.02)
    with pytest.raises(ValueError):
        non_inferior(found, -0.1)


@pytest.mark.parametrize("units", [2, 3, 7])
def test_few_units_get_student_s_interval(units: int) -> None:
    values = np.random.default_rng(units).normal(0.5, 1, (units, 2))
    found = paired_difference(values[:, 0], values[:, 1])
    expected = oracle.ttest_rel(values[:, 0], values[:, 1])
    low, high = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-6)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    assert found.method == "Student's t"


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30, 100, 101, 5000])
def test_quantiles_and_tails_of_t_are_scipy_s(degrees: int) -> None:
    for probability in (0.025, 0.6, 0.975, 0.995, 0.9995):
        quantile = t_quantile(probability, degrees)
        assert quantile == pytest.approx(oracle.t.ppf(probability, degrees), rel=1e-6)
        assert t_two_sided(quantile, degrees) == pytest.approx(2 * oracle.t.sf(quantile, degrees), abs=1e-12)
    assert t_quantile(0.5, degrees) == pytest.approx(0, abs=1e-12)


def test_the_quantile_of_t_is_that_of_the_tables() -> None:
    # Abramowitz & Stegun 1964, table 26.10: 97.5% points for 3, 5 and 10 degrees of freedom.
    assert [round(t_quantile(0.975, n), 3) for n in (3, 5, 10)] == [3.182, 2.571, 2.228]


@pytest.mark.parametrize(
    "call",
    [
        lambda: mean_interval([math.nan]),
        lambda: mean_interval([1, 2], ["a"]),
        lambda: mean_interval([1, 2], level=95),
        lambda: paired_difference([1, 2], [1]),
        lambda: verdict_difference([2]),
        lambda: proportion_interval([1.5]),
    ],
)
def test_what_is_no_data_is_refused(call) -> None:
    with pytest.raises(ValueError):
        call()


def test_the_mean_of_parts_weighs_them_equally_and_adds_squares():
    parts = [
        Interval(estimate, low, high, 0.95, "", "row", 9)
        for estimate, low, high in ((0.9, 0.6, 1.0), (0.5, 0.1, 0.7))
    ]
    found = mean_of_parts(parts)
    # Below: √(.3² + .4²) / 2 = .25; above: √(.1² + .2²) / 2.
    assert (found.estimate, found.low) == (pytest.approx(0.7), pytest.approx(0.45))
    assert found.high == pytest.approx(0.7 + 0.05**0.5 / 2)
    with pytest.raises(ValueError):
        mean_of_parts([])


def test_the_difference_of_two_rates_is_newcombes() -> None:
    """Newcombe 1998, "Interval estimation ...", table II, method 10: 56/70 - 48/80 has .0524 to .3339."""
    found = proportion_difference([1] * 56 + [0] * 14, [1] * 48 + [0] * 32)
    assert found.estimate == pytest.approx(0.2)
    assert (found.low, found.high) == (pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))
    none = proportion_difference([1] * 10, [0] * 20)  # method 10 of 10/10 - 0/20 is .6791 to 1
    assert (none.low, none.high) == (pytest.approx(0.6791, abs=5e-5), pytest.approx(1.0))


def test_an_exact_rate_by_hand() -> None:
    """0 of n: the upper end solves (1 - p)ⁿ = (1 - level)/2. 8 of 10: .4439 to .9748, as tables have it."""
    none = exact_proportion([0] * 10, level=0.9)
    assert (none.low, none.high) == (0.0, pytest.approx(1 - 0.05**0.1, abs=1e-9))
    most = exact_proportion([1] * 8 + [0] * 2)
    assert (most.low, most.high) == (pytest.approx(0.4439, abs=1e-4), pytest.approx(0.9748, abs=1e-4))
    for values in ([], [0.5]):
        with pytest.raises(ValueError):
            exact_proportion(values)
