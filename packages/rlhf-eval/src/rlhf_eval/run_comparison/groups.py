"""Runs in groups, the seeds of each: interquartile means with intervals, and every pair of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from rlhf_eval.stats import (
    Interval,
    holm,
    iqm,
    iqm_interval,
    probability_of_improvement,
    two_sample_difference,
)
from rlhf_eval.stats.interval import t_quantile, t_two_sided

_RESAMPLES = 10_000


@dataclass(frozen=True)
class GroupValue:
    """One measure of a group.

    Attributes:
        value: Interquartile mean over the runs that have it, of one or two runs their mean; None without any.
        low: Lower end of the stratified bootstrap interval over seeds; None unless two runs have it, and all.
        high: Upper end.
        known: Runs that have it.
        runs: Runs of the group.
    """

    value: float | None
    low: float | None
    high: float | None
    known: int
    runs: int


@dataclass(frozen=True)
class Pair:
    """Two groups of seeds, the better first.

    Attributes:
        first: Name of the better group.
        second: Name of the other.
        difference: Difference of the means over seeds, positive where the first is better.
        holm: Its p-value, corrected for the number of pairs; 1 if neither group has any spread.
        probability: Probability that a run of the first is better than one of the second.
    """

    first: str
    second: str
    difference: Interval
    holm: float
    probability: Interval


def summarise_group(values: Sequence[float | None], *, level: float = 0.95) -> GroupValue:
    """One measure over the runs of a group.

    Args:
        values: The measure of each run; None if a run does not define it.
        level: Coverage of the interval.
    """
    known = [value for value in values if value is not None]
    if not known:
        return GroupValue(None, None, None, 0, len(values))
    if len(known) < 2 or len(known) < len(values):
        return GroupValue(iqm(known), None, None, len(known), len(values))
    found = iqm_interval(known, level=level)
    return GroupValue(found.estimate, found.low, found.high, len(known), len(values))


def compare_pairs(
    groups: Mapping[str, Sequence[float]], *, lower_is_better: bool = False, level: float = 0.95
) -> list[Pair]:
    """Every pair of the groups that have two seeds at least.

    Intervals of differences are those of the studentised bootstrap of `two_sample_difference`, which keeps
    its coverage with two seeds, or of Welch's t if all seeds of one group are equal, as happens with coarse
    measures: a bootstrap of two seeds of the other group alone would find nearly any difference significant.
    The probability of improvement is rliable's, whose interval covers too little: it is [1, 1] whenever all
    runs of one group beat all of the other, which happens by chance in a third of the cases with two seeds
    each.

    Args:
        groups: Final values of the runs by the name of their group.
        lower_is_better: Whether less is better.
        level: Coverage of the intervals.

    Returns:
        Pairs in the order of the groups, the best first.
    """
    sign = -1 if lower_is_better else 1
    several = {name: sign * np.array(values) for name, values in groups.items() if len(values) > 1}
    order = sorted(several, key=lambda name: -several[name].mean())
    chosen = list(combinations(order, 2))
    differences = [_difference(several[a], several[b], level) for a, b in chosen]
    adjusted = holm([1.0 if each.p_value is None else each.p_value for each in differences])
    return [
        Pair(a, b, difference, p, probability_of_improvement(several[a], several[b], level=level))
        for (a, b), difference, p in zip(chosen, differences, adjusted, strict=True)
    ]


def _difference(first: np.ndarray, second: np.ndarray, level: float) -> Interval:
    found = two_sample_difference(first, second, level=level, resamples=_RESAMPLES, unit="seed")
    spread = [values for values in (first, second) if np.ptp(values) > 0]
    if len(spread) != 1 or not found.standard_error:
        return found
    degrees = len(spread[0]) - 1  # Welch's (1947), with no variance in the other group
    half = t_quantile((1 + level) / 2, degrees) * found.standard_error
    p_value = t_two_sided(abs(found.estimate) / found.standard_error, degrees)
    low, high = found.estimate - half, found.estimate + half
    return replace(found, low=low, high=high, method="Welch's t", p_value=p_value)
