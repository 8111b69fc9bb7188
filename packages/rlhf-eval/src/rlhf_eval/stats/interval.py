"""Base of all estimators: confidence intervals, units of resampling, two kinds of bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
_FEW_DEGREES = 100
MOST_UNITS = 5000
"""More units are put at random into this many groups, which are resampled; the variance is the same."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval, and how it came about.

    Attributes:
        estimate: The estimate; NaN where the data do not define it.
        low: Lower end; NaN where the data do not define one.
        high: Upper end.
        level: Nominal coverage, such as 0.95.
        method: How the interval was made.
        unit: What is resampled, or taken as independent.
        n: Number of units.
        standard_error: Standard error of the estimate; None if the method has none.
        p_value: Two-sided, of no difference; None if nothing is tested.
    """

    estimate: float
    low: float
    high: float
    level: float
    method: str
    unit: str
    n: int
    standard_error: float | None = None
    p_value: float | None = None

    def excludes(self, value: float) -> bool:
        """Whether the interval lies on one side of `value`."""
        return self.low > value or self.high < value


def normal_quantile(probability: float) -> float:
    """The quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(probability)


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t: `t_two_sided` inverted, or for many degrees of freedom a series.

    Abramowitz & Stegun 1964, "Handbook of mathematical functions", 26.7.5; beyond 100 degrees its error is
    below 2e-6 of the quantile (to a probability of 0.99999).
    """
    if degrees <= _FEW_DEGREES:
        tails = 2 * min(probability, 1 - probability)
        scale = math.sqrt(degrees)
        angle, _ = bisect_range(0, math.pi / 2, lambda at: t_two_sided(scale * math.tan(at), degrees) > tails)
        return math.copysign(scale * math.tan(angle), probability - 0.5)
    z = normal_quantile(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees ** (power + 1) for power, term in enumerate(terms))


def t_two_sided(statistic: float, degrees: int) -> float:
    """Two-sided p-value of Student's t, P(|T| > statistic) (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan(statistic / math.sqrt(degrees))
    odd, cosine = degrees % 2, math.cos(angle)
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


def bisect_range(
    low: float, high: float, is_below: Callable[[float], bool], *, steps: int = 50
) -> tuple[float, float]:
    """Bisect [low, high] `steps` times; the bounds of the interval that contains the switch of `is_below`."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def check_level(level: float) -> None:
    """Refuse a level that is not a probability.

    Raises:
        ValueError: it is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level!r}")


def unit_codes(clusters: Sequence[Hashable] | np.ndarray | None, rows: int) -> np.ndarray:
    """(rows,) number of each row's unit; without clusters each row is its own.

    Raises:
        ValueError: there is not one cluster for each row.
    """
    if clusters is None:
        return np.arange(rows)
    if len(clusters) != rows:
        raise ValueError(f"got {len(clusters)} clusters for {rows} rows; one each is expected")
    if isinstance(clusters, np.ndarray) and clusters.ndim == 1 and clusters.dtype.kind in "iu":
        _, first, which = np.unique(clusters, return_index=True, return_inverse=True)
        order = np.empty(len(first), dtype=np.intp)  # units are numbered in the order of their first rows
        order[np.argsort(first)] = np.arange(len(first))
        return order[which]
    codes: dict[Hashable, int] = {}
    return np.fromiter((codes.setdefault(key, len(codes)) for key in clusters), dtype=np.intp, count=rows)


def grouped(codes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Codes of at most MOST_UNITS units, which are groups of the given ones where those are more."""
    units = int(codes.max()) + 1 if len(codes) else 0
    return codes if units <= MOST_UNITS else (rng.permutation(units) % MOST_UNITS)[codes]


def resampled_counts(units: int, resamples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """How often each unit is drawn: blocks of (some, units), `resamples` rows in all."""
    block = max(1, 2_000_000 // max(units, 1))
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        drawn = rng.integers(0, units, (size, units)) + np.arange(size)[:, None] * units
        yield np.bincount(drawn.ravel(), minlength=size * units).reshape(size, units).astype(float)


@dataclass(frozen=True)
class ClusterMean:
    """The mean over the rows of a sample whose units are clusters of rows, and its bootstrap.

    The mean is the ratio of the units' sums to their sizes, and its standard error the ratio's (Cochran
    1977, "Sampling techniques", eq. 6.13): se = √(G/(G−1) · Σ_g (s_g − θ m_g)²) / Σ_g m_g.
    """

    sums: np.ndarray
    sizes: np.ndarray
    units: int

    @classmethod
    def of(
        cls,
        values: ArrayLike,
        clusters: Sequence[Hashable] | np.ndarray | None,
        rng: np.random.Generator,
    ) -> ClusterMean:
        """Collect the rows of each unit.

        Raises:
            ValueError: a value is not finite, or there is not one cluster for each.
        """
        found = np.asarray(values, dtype=float)
        if found.ndim != 1 or not np.isfinite(found).all():
            raise ValueError("values must be a flat sequence of finite numbers; leave out rows without one")
        codes = unit_codes(clusters, len(found))
        units = int(codes.max()) + 1 if len(codes) else 0
        codes = grouped(codes, rng)
        return cls(np.bincount(codes, found), np.bincount(codes).astype(float), units)

    def moments(self) -> np.ndarray:
        """(groups, 5) of s, m, s², sm, m²."""
        s, m = self.sums, self.sizes
        return np.stack([s, m, s * s, s * m, m * m], axis=1)

    def mean(self) -> tuple[float, float]:
        """Mean and standard error; NaN if there is no row, or no second unit."""
        mean, error = _mean_and_error(self.moments().sum(0)[None], len(self.sums))
        return float(mean[0]), float(error[0])

    def resampled(self, resamples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(resamples,) means and (resamples,) standard errors."""
        moments = self.moments()
        blocks = resampled_counts(len(moments), resamples, rng)
        sums = np.concatenate([counts @ moments for counts in blocks])
        return _mean_and_error(sums, len(moments))


def _mean_and_error(sums: np.ndarray, units: int) -> tuple[np.ndarray, np.ndarray]:
    s, m, ss, sm, mm = sums.T
    if not units:
        return np.full(len(sums), math.nan), np.full(len(sums), math.nan)
    mean = s / m
    squares = np.maximum(ss - 2 * mean * sm + mean**2 * mm, 0)
    squares[squares <= 1e-12 * np.maximum(ss, 1e-300)] = 0  # what rounding leaves of equal values
    return mean, np.sqrt(squares * units / (units - 1)) / m if units > 1 else np.full(len(sums), math.nan)


def percentile_t(
    estimate: float, error: float, resampled: tuple[np.ndarray, np.ndarray], level: float
) -> tuple[float, float, float]:
    """Both ends and the two-sided p-value of zero, by the studentised bootstrap.

    The quantiles of t* = (θ* − θ) / se* take the place of the normal's: [θ − t*_(1−α/2) se, θ − t*_(α/2) se]
    (Efron & Tibshirani 1993, "An introduction to the bootstrap", section 12.5). A resample of nearly equal
    units has an se* near 0, so that the divisor is at least se/4.
    """
    means, errors = resampled
    ratios = np.sort((means - estimate) / np.maximum(errors, error / 4))
    tail = (1 - level) / 2
    lower, upper = np.quantile(ratios, [tail, 1 - tail], method="weibull")
    observed = estimate / error
    beyond = min((ratios >= observed).sum(), (ratios <= observed).sum())
    p_value = min(1.0, 2 * (1 + int(beyond)) / (len(ratios) + 1))
    return estimate - upper * error, estimate - lower * error, p_value


def percentile(estimates: np.ndarray, level: float) -> tuple[float, float]:
    """Both ends by the quantiles of the estimates of resamples; those that are undefined are left out."""
    defined = estimates[np.isfinite(estimates)]
    if not len(defined):
        return math.nan, math.nan
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2], method="weibull")
    return float(low), float(high)
