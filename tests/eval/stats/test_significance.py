"""Exact tests, corrections and power, by hand and against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as oracle

from rlhf_eval.stats import (
    benjamini_hochberg,
    detectable_difference,
    detectable_rate,
    fisher_exact,
    holm,
    mcnemar,
    paired_power,
    sign_test,
    units_needed,
)

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_mcnemar_by_hand() -> None:
    # 5 gains, 1 loss: 2 * (C(6,0) + C(6,1)) / 2⁶ = 14/64
    first, second = [1] * 5 + [0] + [1] * 10, [0] * 5 + [1] + [1] * 10
    assert mcnemar(first, second) == pytest.approx(14 / 64)
    assert mcnemar(second, first) == pytest.approx(14 / 64)
    assert mcnemar([1, 0], [1, 0]) == 1
    with pytest.raises(ValueError):
        mcnemar([0.5], [1])


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (9, 2), (30, 30), (700, 820)])
def test_the_sign_test_is_scipy_s(wins: int, losses: int) -> None:
    first = [1.0] * wins + [0.0] * (losses + 3)
    second = [0.5] * (wins + losses) + [0.0] * 3
    expected = oracle.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert sign_test(first, second) == pytest.approx(expected, rel=1e-9)


def test_holm_and_benjamini_hochberg_by_hand() -> None:
    # Rising: .01, .02, .04. Holm: 3*.01, 2*.02, 1*.04. BH: min(3*.01, 3*.02/2, 3*.04/3).
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert benjamini_hochberg([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.03])
    assert holm([]) == []


@settings(deadline=None)
@given(P_VALUES)
def test_corrections(p_values: list[float]) -> None:
    adjusted, found = holm(p_values), benjamini_hochberg(p_values)
    assert found == pytest.approx(oracle.false_discovery_control(p_values).tolist())
    assert all(
        p <= q + 1e-12 and q <= h + 1e-12 and h <= 1
        for p, q, h in zip(p_values, found, adjusted, strict=True)
    )
    assert sorted(adjusted) == [adjusted[i] for i in np.argsort(p_values, kind="stable")]


def test_power_by_hand() -> None:
    # (1.959964 + .841621) * 1 / 10
    assert detectable_difference(1, 100) == pytest.approx(0.2801585, abs=1e-6)
    assert units_needed(0.2801586, 1) == 100
    assert paired_power(0.2801585, 1, 100) == pytest.approx(0.8, abs=1e-4)
    assert paired_power(0, 1, 50) == pytest.approx(0.05)
    # At p = .6: .1 √n = 1.959964 * .5 + .841621 * √.24 gives n = 193.8
    assert detectable_rate(194) == pytest.approx(0.6, abs=2e-4)
    assert detectable_rate(1) == pytest.approx(1, abs=0.01)


def test_power_is_what_simulation_sees() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.normal(0.25, 1, (4000, 100))
    rejected = np.abs(drawn.mean(1) / (drawn.std(1, ddof=1) / 10)) > 1.96
    assert rejected.mean() == pytest.approx(paired_power(0.25, 1, 100), abs=0.03)


def test_what_no_number_shows_is_refused() -> None:
    with pytest.raises(ValueError):
        units_needed(0, 1)
    with pytest.raises(ValueError):
        detectable_difference(1, 0)
    assert math.isfinite(detectable_difference(0, 5))


def test_fishers_test_counts_the_ways() -> None:
    # Of 3 + 3 rows 3 are ones. The first has at most 1 in C(3,0) C(3,3) + C(3,1) C(3,2) = 10 of 20 ways.
    assert fisher_exact([1, 0, 0], [1, 1, 0]) == pytest.approx(0.5)
    assert fisher_exact([0, 0, 0], [1, 1, 1]) == pytest.approx(1 / 20)
    assert fisher_exact([1, 1, 1], [0, 0, 0]) == 1.0
    for a, n, b, m in ((14, 150, 170, 1500), (0, 9, 40, 41), (90_000, 100_000, 180_500, 200_000)):
        _, expected = oracle.fisher_exact([[a, n - a], [b, m - b]], alternative="less")
        found = fisher_exact([1] * a + [0] * (n - a), [1] * b + [0] * (m - b))
        assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="0 and 1"):
        fisher_exact([0.5], [1])
