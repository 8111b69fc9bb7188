"""Measures of one curve: how noisy it is, when it arrives, its value at a given KL.

A curve is a flat sequence of logged values; windows count logged values, whatever the steps between them.
What a curve does not define is NaN.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

WINDOW = 11
"""Logged values of the running mean and the running median."""
HOLD = 5
"""Logged values for which a threshold must be held."""
FRACTION = 0.9
"""Part of the way from the start to the best final value at which a run counts as converged."""
_FINAL = 10
"""The end of a curve is its last 1 / `_FINAL`."""


def running_mean(values: ArrayLike, window: int = WINDOW) -> np.ndarray:
    """Centred moving average; the window is symmetric and shrinks towards both ends.

    A straight line is left unchanged, at its ends too.

    `window`, an odd number, is the most values that are averaged.

    Returns:
        (n,)
    """
    return np.array([part.mean() for part in _windows(values, window)])


def running_median(values: ArrayLike, window: int = WINDOW) -> np.ndarray:
    """Centred moving median (n,), over the windows of `running_mean`."""
    return np.array([np.median(part) for part in _windows(values, window)])


def detrended_variance(values: ArrayLike, window: int = WINDOW) -> float:
    """Variance of the residuals of a running median, over the second half of a curve.

    The median follows the trend, so that the residuals are noise and jumps, and a curve is not called
    unstable because it falls. NaN for fewer values than the window has.
    """
    found = np.asarray(values, dtype=float)
    if len(found) < window:
        return math.nan
    rest = found - running_median(found, window)
    return float(rest[len(rest) // 2 :].var())


def oscillation(smoothed: ArrayLike) -> float:
    """Total variation of a curve relative to its net change: Σ|Δr| / |r_end − r_start|.

    1 for a monotonic curve; NaN for one that ends where it began.
    """
    found = np.asarray(smoothed, dtype=float)
    ahead = float(abs(found[-1] - found[0])) if len(found) else 0.0
    return float(np.abs(np.diff(found)).sum()) / ahead if ahead > 0 else math.nan


def final_mean(values: ArrayLike) -> float:
    """Mean of the last tenth of a curve, of at least one value; NaN for an empty one."""
    found = np.asarray(values, dtype=float)
    return float(found[-math.ceil(len(found) / _FINAL) :].mean()) if len(found) else math.nan


def convergence_threshold(starts: ArrayLike, finals: ArrayLike, fraction: float = FRACTION) -> float:
    """The value from which a run counts as converged: start + fraction · (best final − start).

    The start is the mean over all runs that are compared, the best final value the highest of any: one
    threshold for all. NaN where no run ends above the start.

    Args:
        starts: (runs,) values at the start.
        finals: (runs,) values at the end, more is better.
        fraction: Fraction of the way.
    """
    start, best = float(np.asarray(starts).mean()), float(np.asarray(finals).max())
    return start + fraction * (best - start) if best > start else math.nan


def first_held(smoothed: ArrayLike, threshold: float, hold: int = HOLD) -> int | None:
    """Index of the first of `hold` consecutive values at or above a threshold.

    Args:
        smoothed: (n,) the smoothed curve.
        threshold: What must be reached; NaN is never reached.
        hold: Number of consecutive values; a curve that ends before has not converged.

    Returns:
        The index; None if there is no such value.
    """
    above = np.asarray(smoothed, dtype=float) >= threshold
    if len(above) < hold:
        return None
    held = np.lib.stride_tricks.sliding_window_view(above, hold).all(axis=1)
    return int(held.argmax()) if held.any() else None


def at_kl(kls: ArrayLike, values: ArrayLike, at: float) -> float:
    """A curve's value where its KL first reaches `at`, linear between the points on either side.

    Rewards are compared at equal distance from the start as in Gao et al. 2022, "Scaling laws for reward
    model overoptimization", section 3, https://arxiv.org/abs/2210.10760.

    Args:
        kls: (n,) KL to the start, in the order of training.
        values: (n,) the values at these KLs.
        at: The KL at which the curve is read.

    Returns:
        The value; NaN where the curve begins beyond `at`, or never gets there.
    """
    x, y = np.asarray(kls, dtype=float), np.asarray(values, dtype=float)
    beyond = np.flatnonzero(x >= at)
    if not len(beyond):
        return math.nan
    i = int(beyond[0])
    if i == 0:
        return float(y[0]) if x[0] == at else math.nan
    share = (at - x[i - 1]) / (x[i] - x[i - 1])
    return float(y[i - 1] + share * (y[i] - y[i - 1]))


def _windows(values: ArrayLike, window: int) -> list[np.ndarray]:
    found = np.asarray(values, dtype=float)
    halves = [min(window // 2, i, len(found) - 1 - i) for i in range(len(found))]
    return [found[i - half : i + half + 1] for i, half in enumerate(halves)]
