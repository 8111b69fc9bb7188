"""Exact tests of paired outcomes, corrections for many tests, and how much data a difference needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from rlhf_eval.stats.interval import bisect_range, normal_quantile


def sign_test(first: ArrayLike, second: ArrayLike) -> float:
    """Two-sided p-value of the exact sign test: rows that differ favour either side equally often.

    2 · P(X ≤ min(wins, losses)) with X ~ Binomial(wins + losses, ½), at most 1; ties are left out. For rows
    of 0 and 1 this is the exact test of McNemar 1947, "Note on the sampling error of the difference between
    correlated proportions", https://doi.org/10.1007/BF02295996. Rows must be independent: one for each
    prompt.

    Args:
        first: (n,) scores of one model.
        second: (n,) scores of the other, of the same rows.

    Raises:
        ValueError: the lengths differ.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if a.shape != b.shape:
        raise ValueError(f"got {a.size} and {b.size} scores; paired scores have one of each for every row")
    wins, losses = int((a > b).sum()), int((a < b).sum())
    return min(1.0, 2 * _binomial_cdf(min(wins, losses), wins + losses))


def mcnemar(first: ArrayLike, second: ArrayLike) -> float:
    """Two-sided p-value of McNemar's exact test of paired right and wrong answers; see `sign_test`.

    Raises:
        ValueError: the lengths differ, or a value is neither true nor false.
    """
    for values in (first, second):
        if not np.isin(np.asarray(values, dtype=float), (0, 1)).all():
            raise ValueError(
                "McNemar's test takes right and wrong answers, 1 and 0; use sign_test for scores"
            )
    return sign_test(first, second)


def fisher_exact(first: ArrayLike, second: ArrayLike) -> float:
    """One-sided p-value of Fisher's exact test, against the alternative that the first rate is the lower one.

    P(X ≤ k) for the k ones of the first sample, X hypergeometric: its n rows drawn from all n + m, of which
    as many are ones as were seen (Fisher 1935, "The logic of inductive inference"). No row is in both.

    Args:
        first: (n,) of 0 and 1.
        second: (m,) of 0 and 1.

    Raises:
        ValueError: a value is neither 0 nor 1.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if not (np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all()):
        raise ValueError("Fisher's test takes two samples of 0 and 1")
    ones, seen = int(a.sum() + b.sum()), int(a.sum())
    taken = np.arange(max(0, ones - b.size), min(ones, a.size) + 1)  # ones that the first sample may have
    logs = _log_comb(ones, taken) + _log_comb(a.size + b.size - ones, a.size - taken)
    ways = np.exp(logs - logs.max())
    return float(ways[taken <= seen].sum() / ways.sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for the family-wise error rate: the probability of any false finding.

    Adjusted p₍ᵢ₎ = max over j ≤ i of min(1, (m − j + 1) p₍ⱼ₎), in rising order; Holm 1979, "A simple
    sequentially rejective multiple test procedure". Nothing is assumed about how the tests depend on each
    other.

    Args:
        p_values: Of m tests.

    Returns:
        (m,) adjusted p-values in the order given.
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(np.minimum(1, p[order] * (len(p) - np.arange(len(p)))))
    return _in_order(adjusted, order)


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for the false discovery rate: the expected share of false findings.

    Adjusted p₍ᵢ₎ = min over j ≥ i of min(1, m p₍ⱼ₎ / j); Benjamini & Hochberg 1995, "Controlling the false
    discovery rate". For independent or positively dependent tests.

    Args:
        p_values: Of m tests.

    Returns:
        (m,) adjusted p-values in the order given.
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")[::-1]
    scaled = np.minimum(1, p[order] * len(p) / np.arange(len(p), 0, -1))
    return _in_order(np.minimum.accumulate(scaled), order)


def detectable_difference(
    standard_deviation: float, n: int, *, power: float = 0.8, level: float = 0.95
) -> float:
    """The smallest mean paired difference that n units show with this power.

    (z_(1−α/2) + z_power) · sd / √n, with sd of the units' differences (Miller 2024, section 5).

    Raises:
        ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n!r}")
    return _both_quantiles(power, level) * standard_deviation / math.sqrt(n)


def units_needed(
    difference: float, standard_deviation: float, *, power: float = 0.8, level: float = 0.95
) -> int:
    """How many units show a mean paired difference with this power: the inverse of `detectable_difference`.

    Raises:
        ValueError: the difference is zero, which no number shows.
    """
    if not difference:
        raise ValueError("no number of units shows a difference of zero")
    return math.ceil((_both_quantiles(power, level) * standard_deviation / difference) ** 2)


def paired_power(difference: float, standard_deviation: float, n: int, *, level: float = 0.95) -> float:
    """The probability that n units show a mean paired difference: Φ(|δ|√n / sd − z) + Φ(−|δ|√n / sd − z)."""
    shift = abs(difference) * math.sqrt(n) / standard_deviation
    z = normal_quantile((1 + level) / 2)
    return NormalDist().cdf(shift - z) + NormalDist().cdf(-shift - z)


def detectable_rate(n: int, baseline: float = 0.5, *, power: float = 0.8, level: float = 0.95) -> float:
    """The smallest rate above `baseline` that n independent trials show with this power.

    The p with (p − p₀)√n = z_(1−α/2) √(p₀(1−p₀)) + z_power √(p(1−p)), the score test of one proportion
    (Fleiss, Levin & Paik 2003, "Statistical methods for rates and proportions", section 2.5); 1 where none
    below it does.

    Args:
        n: Trials, such as prompts with a verdict.
        baseline: The rate without a difference.
        power: Probability that it shows.
        level: 1 − size of the two-sided test.
    """
    z, z_power = normal_quantile((1 + level) / 2), normal_quantile(power)

    def is_missed(rate: float) -> bool:
        need = z * math.sqrt(baseline * (1 - baseline)) + z_power * math.sqrt(rate * (1 - rate))
        return (rate - baseline) * math.sqrt(n) < need

    return bisect_range(baseline, 1.0, is_missed, steps=60)[1]


def _both_quantiles(power: float, level: float) -> float:
    return normal_quantile((1 + level) / 2) + normal_quantile(power)


def _binomial_cdf(most: int, n: int) -> float:
    """P(X ≤ most) for X ~ Binomial(n, ½)."""
    k = np.arange(1, most + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(n - k + 1) - np.log(k))]) - n * math.log(2)
    return float(np.exp(logs).sum())


def _log_comb(n: int, k: np.ndarray) -> np.ndarray:
    """Logarithms of the binomial coefficients of n over each k."""
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    return factorials[n] - factorials[k] - factorials[n - k]


def _in_order(adjusted: np.ndarray, order: np.ndarray) -> list[float]:
    restored = np.empty_like(adjusted)
    restored[order] = adjusted
    return restored.tolist()
