"""Means and their differences, paired or not, from rows that may come in clusters; non-inferiority.

Shared arguments: `clusters` (n,) says what each row belongs to, such as its prompt, and rows of one cluster
are drawn together; None makes each row its own. `level` is the nominal coverage, `resamples` and `seed` are
those of the bootstrap, and `unit` is what a cluster is called in the result. A ValueError is raised where a
value is not finite, the clusters do not match, or `level` is not a probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from rlhf_eval.stats.interval import (
    RESAMPLES,
    ClusterMean,
    Interval,
    bisect_range,
    check_level,
    normal_quantile,
    percentile_t,
    t_quantile,
)

Clusters = Sequence[Hashable] | np.ndarray | None
VERDICTS = (0, 0.5, 1)
"""Lost, tied, won; wrong, half right, right."""

EXACT = "Clopper-Pearson"
"""Method of an interval that covers at least its level."""
_METHOD = "studentised bootstrap"
_NO_SPREAD = "no spread seen"
_FEW_UNITS = 8


def mean_interval(
    values: ArrayLike,
    clusters: Clusters = None,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
    unit: str = "row",
) -> Interval:
    """Mean of the rows, with the interval of the studentised bootstrap over their clusters.

    Fewer than 8 units have too few different resamples; they get Student's interval, exact for normal units.
    `p_value` tests a mean of zero. If all units have the same value, both ends are NaN.
    """
    check_level(level)
    rng = np.random.default_rng(seed)
    sample = ClusterMean.of(values, clusters, rng)
    mean, error = sample.mean()
    if not error > 0:  # nan too: fewer than two units
        return Interval(mean, math.nan, math.nan, level, _NO_SPREAD, unit, sample.units, error)
    if sample.units < _FEW_UNITS:
        degrees = sample.units - 1

        def ends(at: float) -> tuple[float, float]:
            half = t_quantile((1 + at) / 2, degrees) * error
            return mean - half, mean + half

        p_value = _level_that_touches_zero(ends)
        return Interval(mean, *ends(level), level, "Student's t", unit, sample.units, error, p_value)
    low, high, p_value = percentile_t(mean, error, sample.resampled(resamples, rng), level)
    return Interval(mean, low, high, level, _METHOD, unit, sample.units, error, p_value)


def paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    clusters: Clusters = None,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
    unit: str = "row",
) -> Interval:
    """Mean of first − second over the same rows, as `mean_interval` of the rows' differences.

    Two models that answer the same prompts are paired: what makes a prompt hard cancels (Miller 2024, "Adding
    error bars to evals", section 4.2, https://arxiv.org/abs/2411.00640). Verdicts (scores that are all 0, ½
    or 1) take the interval of `verdict_difference`. Both are (n,) scores of the same rows in the same order.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if a.shape != b.shape:
        raise ValueError(f"got {a.size} and {b.size} scores; paired scores have one of each for every row")
    if np.isin(a, VERDICTS).all() and np.isin(b, VERDICTS).all():
        return verdict_difference(a - b, clusters, level=level, unit=unit)
    return mean_interval(a - b, clusters, level=level, resamples=resamples, seed=seed, unit=unit)


def verdict_difference(
    differences: ArrayLike, clusters: Clusters = None, *, level: float = 0.95, unit: str = "row"
) -> Interval:
    """Mean of paired differences of verdicts, from Wilson's intervals of gains and losses.

    With p and q the means of the positive and of the negative parts, [l, u] the interval of each by
    `proportion_interval` and r their correlation: p − q − √((p−l_p)² − 2r(p−l_p)(u_q−q) + (u_q−q)²) and
    likewise above (the square-and-add method of Newcombe 1998, "Improved confidence intervals for the
    difference between binomial proportions based on paired data", and Zou & Donner 2008,
    https://doi.org/10.1002/sim.3095). The bootstrap's intervals are too narrow where few verdicts differ:
    with 4 of 100 expected to, its 95% interval covers 83%.

    Fewer than 8 units tell neither r nor tails that are nearly normal: Wilson's intervals then have the
    correction for continuity, and r is -1, so that a difference is found where the sign test finds it.

    Raises:
        ValueError: a difference is not in [−1, 1].
    """
    check_level(level)
    found = np.asarray(differences, dtype=float)
    if found.size and not (np.abs(found) <= 1).all():
        raise ValueError("differences of verdicts must be in [-1, 1]")
    gain, loss, whole = (
        ClusterMean.of(values, clusters, np.random.default_rng(0))
        for values in (np.maximum(found, 0), np.maximum(-found, 0), found)
    )
    mean, error = whole.mean()
    if math.isnan(error):
        return Interval(mean, math.nan, math.nan, level, _NO_SPREAD, unit, whole.units, error)
    (p, error_p), (q, error_q) = gain.mean(), loss.mean()
    apart = 2 * error_p * error_q
    r = float(np.clip((error_p**2 + error_q**2 - error**2) / apart, -1, 1)) if apart else 0.0
    few = whole.units < _FEW_UNITS
    r = -1.0 if few else r

    def ends(level: float) -> tuple[float, float]:
        low_p, high_p = _wilson_of(p, error_p, gain.units, level, continuity=few)
        low_q, high_q = _wilson_of(q, error_q, loss.units, level, continuity=few)
        below = (p - low_p) ** 2 - 2 * r * (p - low_p) * (high_q - q) + (high_q - q) ** 2
        above = (high_p - p) ** 2 - 2 * r * (high_p - p) * (q - low_q) + (q - low_q) ** 2
        return mean - math.sqrt(max(below, 0)), mean + math.sqrt(max(above, 0))

    low, high = ends(level)
    p_value = _level_that_touches_zero(ends)
    method = "Wilson with continuity, added" if few else "Wilson, square and add"
    return Interval(mean, low, high, level, method, unit, whole.units, error, p_value)


def two_sample_difference(
    first: ArrayLike,
    second: ArrayLike,
    clusters: tuple[Clusters, Clusters] = (None, None),
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
    unit: str = "row",
) -> Interval:
    """Mean of first (n,) − mean of second (m,), of samples that share no rows; both are resampled."""
    check_level(level)
    rng = np.random.default_rng(seed)
    samples = [ClusterMean.of(values, of, rng) for values, of in zip((first, second), clusters, strict=True)]
    (mean_a, error_a), (mean_b, error_b) = (sample.mean() for sample in samples)
    estimate, error = mean_a - mean_b, math.hypot(error_a, error_b)
    n = samples[0].units + samples[1].units
    if not error > 0:
        return Interval(estimate, math.nan, math.nan, level, _NO_SPREAD, unit, n, error)
    (means_a, errors_a), (means_b, errors_b) = (sample.resampled(resamples, rng) for sample in samples)
    resampled = (means_a - means_b, np.hypot(errors_a, errors_b))
    low, high, p_value = percentile_t(estimate, error, resampled, level)
    return Interval(estimate, low, high, level, _METHOD, unit, n, error, p_value)


def proportion_interval(
    values: ArrayLike, clusters: Clusters = None, *, level: float = 0.95, unit: str = "row"
) -> Interval:
    """A rate of rows between 0 and 1, with Wilson's interval at the effective number of units.

    That number is p(1 − p)/se², with se of the clusters: it is n for independent rows of 0 and 1, less where
    rows of a cluster are alike, more for probabilities (the effective sample size of Korn & Graubard 1998,
    "Confidence intervals for proportions with small expected number of positive counts", with the interval of
    Wilson 1927, "Probable inference", https://doi.org/10.1080/01621459.1927.10502953). The bootstrap does not
    cover at rates near 0 and 1, where this one does.

    Raises:
        ValueError: a value is outside [0, 1].
    """
    check_level(level)
    found = np.asarray(values, dtype=float)
    if found.size and not ((found >= 0) & (found <= 1)).all():
        raise ValueError("the values of a proportion must be in [0, 1]")
    sample = ClusterMean.of(found, clusters, np.random.default_rng(0))
    mean, error = sample.mean()
    low, high = _wilson_of(mean, error, sample.units, level)
    method = "Wilson, effective sample size"
    return Interval(mean, low, high, level, method, unit, sample.units, error)


def exact_proportion(values: ArrayLike, *, level: float = 0.95, unit: str = "row") -> Interval:
    """A rate k/n of independent rows of 0 and 1, with an interval that covers at least its level.

    Its ends are the rates p at which P(X ≥ k) and P(X ≤ k) of a binomial X are (1 − level)/2; 0 and 1 where
    k is 0 and n (Clopper & Pearson 1934, "The use of confidence or fiducial limits illustrated in the case of
    the binomial", https://doi.org/10.1093/biomet/26.4.404).

    Raises:
        ValueError: a value is neither 0 nor 1, or there is none.
    """
    check_level(level)
    found = np.asarray(values, dtype=float)
    if not found.size or not np.isin(found, (0, 1)).all():
        raise ValueError("a rate takes values of 0 and 1, and at least one")
    n, k = found.size, int(found.sum())
    low = 0.0 if k == 0 else 1 - _largest_rate(n - k, n, (1 - level) / 2)
    high = 1.0 if k == n else _largest_rate(k, n, (1 - level) / 2)
    rate = k / n
    return Interval(rate, low, high, level, EXACT, unit, n, math.sqrt(rate * (1 - rate) / n))


def _largest_rate(k: int, n: int, probability: float) -> float:
    """The rate p at which a binomial of n trials has at most k with this probability, by halving."""
    counts = np.arange(k + 1)
    logs = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in counts])

    def is_likelier(rate: float) -> bool:
        return np.exp(logs + counts * math.log(rate) + (n - counts) * math.log1p(-rate)).sum() > probability

    return bisect_range(0.0, 1.0, is_likelier)[1]


def rows_that_agree(distance: float, alpha: float, *, exact: bool) -> int:
    """Smallest number of rows, all 0, whose rate has an upper bound below `distance`, plus one.

    `distance` is in (0, 1). Exact: (1 − distance)ⁿ < α; else Wilson's bound z² / (n + z²).
    """
    least = min(distance, 0.99)
    if exact:
        return math.ceil(math.log(alpha) / math.log1p(-least)) + 1
    return math.ceil(normal_quantile(1 - alpha) ** 2 * (1 - least) / least) + 1


def proportion_difference(
    first: ArrayLike, second: ArrayLike, *, level: float = 0.95, unit: str = "row"
) -> Interval:
    """Rate of first (n,) − rate of second (m,), samples that share no rows, from Wilson's intervals.

    With p in [l_p, u_p] and q in [l_q, u_q]: p − q − √((p − l_p)² + (u_q − q)²) to p − q + √((u_p − p)² +
    (q − l_q)²) (Newcombe 1998, "Interval estimation for the difference between independent proportions",
    method 10, https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I).

    Raises:
        ValueError: a value is neither 0 nor 1, or there is none.
    """
    check_level(level)
    samples = [np.asarray(values, dtype=float) for values in (first, second)]
    if any(not sample.size or not np.isin(sample, (0, 1)).all() for sample in samples):
        raise ValueError("a difference of rates takes two samples of 0 and 1")
    (p, q), (n, m) = (float(sample.mean()) for sample in samples), (sample.size for sample in samples)
    (low_p, high_p), (low_q, high_q) = wilson(p, n, level=level), wilson(q, m, level=level)
    ends = p - q - math.hypot(p - low_p, high_q - q), p - q + math.hypot(high_p - p, q - low_q)
    error = math.sqrt(p * (1 - p) / n + q * (1 - q) / m)
    return Interval(p - q, *ends, level, "Wilson, square and add", unit, n + m, error)


def mean_of_parts(parts: Sequence[Interval]) -> Interval:
    """Mean of independent estimates with equal weights, however many rows each is of.

    With estimates θ_i in [l_i, u_i], θ their mean and S their number: θ − √Σ(θ_i − l_i)²/S to
    θ + √Σ(u_i − θ_i)²/S (Zou & Donner 2008, https://doi.org/10.1002/sim.3095, which keeps the coverage of the
    parts' intervals near 0 and 1). NaN where a part has no interval.

    Raises:
        ValueError: there are no parts, or their levels differ.
    """
    if len({part.level for part in parts}) != 1:
        raise ValueError("expected at least one estimate, and all of one level")
    found, low, high = np.array([(part.estimate, part.low, part.high) for part in parts]).T
    mean, below, above = (
        float(value) for value in (found.mean(), *(np.linalg.norm(found - end) for end in (low, high)))
    )
    count = len(parts)
    ends = mean - below / count, mean + above / count
    return Interval(mean, *ends, parts[0].level, "square and add", "part", count)


def wilson(rate: float, n: float, *, level: float = 0.95, continuity: bool = False) -> tuple[float, float]:
    """Both ends of Wilson's score interval of a rate seen in n independent trials.

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n), Wilson 1927, eq. for the limits; NaN for n = 0. With
    `continuity` the limits of p ± 1/2n (Newcombe 1998, "Two-sided confidence intervals for the single
    proportion", method 4), which are nearly those of the binomial itself.
    """
    if not n > 0:
        return math.nan, math.nan
    z = normal_quantile((1 + level) / 2)
    if continuity:
        below = z * math.sqrt(max(z * z - 2 - 1 / n + 4 * rate * (n * (1 - rate) + 1), 0))
        above = z * math.sqrt(max(z * z + 2 - 1 / n + 4 * rate * (n * (1 - rate) - 1), 0))
        low = (2 * n * rate + z * z - 1 - below) / (2 * (n + z * z))
        high = (2 * n * rate + z * z + 1 + above) / (2 * (n + z * z))
        return (max(0.0, low) if rate > 0 else 0.0), (min(1.0, high) if rate < 1 else 1.0)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    centre = rate + z * z / (2 * n)
    low, high = (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)
    return (max(0.0, low) if rate > 0 else 0.0), (min(1.0, high) if rate < 1 else 1.0)


def non_inferior(difference: Interval, margin: float) -> bool:
    """Whether the interval of new − old lies above −margin: the new one is worse by less than the margin.

    With an interval of level 1 − 2α this is a one-sided test of size α (Schuirmann 1987; ICH E9, section
    3.3.2): at level 0.95 the risk of passing what is worse by the margin is 2.5%.

    Args:
        difference: Of new − old.
        margin: The loss that does not matter, in the units of the score, at least 0.

    Raises:
        ValueError: the margin is negative.
    """
    if not margin >= 0:
        raise ValueError(f"margin must be at least 0, got {margin!r}")
    return difference.low > -margin


def _wilson_of(
    rate: float, error: float, units: int, level: float, *, continuity: bool = False
) -> tuple[float, float]:
    """Wilson's interval at the number of units that the standard error implies."""
    n = rate * (1 - rate) / error**2 if error > 0 else units
    return wilson(rate, n, level=level, continuity=continuity)


def _level_that_touches_zero(ends: Callable[[float], tuple[float, float]]) -> float:
    """The p-value of zero: 1 − the level whose interval just reaches it."""

    def excludes(level: float) -> bool:
        low, high = ends(max(level, 1e-15))
        return not low <= 0 <= high

    most = 1 - 1e-12
    return 1 - (most if excludes(most) else bisect_range(0.0, most, excludes)[1])
