"""Held-out splits in proportion, in which no group of rows is on both sides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MIX = np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True)
class Split:
    """Which rows are held out.

    Attributes:
        held_out: bool, one entry a row.
        rows: rows of each stratum.
        wanted: held-out rows that each stratum is due.
        taken: held-out rows that it has; fewer where its groups are too large to fit in.
    """

    held_out: NDArray[np.bool_]
    rows: NDArray[np.int64]
    wanted: NDArray[np.int64]
    taken: NDArray[np.int64]


def quantile_bins(values: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], list[int]]:
    """Return the bin of each value from 0, and the smallest value of every bin after the first.

    The edges are quantiles of the values, so that bins are about equally full; equal values share a bin.
    """
    if not len(values):
        return np.zeros(0, np.int64), []
    ordered = np.sort(values)
    edges = np.unique(ordered[np.arange(1, count) * len(values) // count])
    edges = edges[edges > ordered[0]]
    return np.searchsorted(edges, values, side="right").astype(np.int64), edges.tolist()


def connected(*keys: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return the group of each row, its smallest index; rows that share a value of any key are in one."""
    group = np.arange(len(keys[0]))
    codes = [np.unique(key, return_inverse=True)[1] for key in keys]
    while True:
        before = group
        for code in codes:
            least = np.full(len(group), len(group))
            np.minimum.at(least, code, group)
            group = least[code]
        if (group == before).all():
            return group


def split_groups(
    groups: NDArray[np.generic],
    strata: NDArray[np.int64],
    fraction: float,
    hashes: NDArray[np.uint64],
    seed: int = 0,
) -> Split:
    """Hold out a share of the rows of each stratum, whole groups only.

    Every stratum is due its share, rounded so that the numbers add up (largest remainder). Groups are taken
    in the order of a hash as long as no stratum gets more than its due, so neither the order of the rows
    nor their number in other strata decides. Strata whose rows are single are matched exactly.

    Args:
        groups: what rows share that must stay together, such as a prompt.
        strata: the stratum of each row, from 0.
        fraction: share of the rows to hold out, at least 0 and below 1.
        hashes: hashes of the rows' content; a group has its smallest one.
        seed: another seed, another choice.
    """
    rows = np.bincount(strata)
    wanted = _largest_remainder(rows, fraction)
    taken, held_out = np.zeros_like(wanted), np.zeros(len(strata), bool)
    _, group = np.unique(groups, return_inverse=True)
    least = np.full(int(group.max(initial=-1)) + 1, np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(least, group, hashes)
    rank = _mix(least ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64))
    order = np.lexsort((group, least[group], rank[group]))
    starts = np.flatnonzero(np.append(True, np.diff(group[order]) != 0)) if len(order) else order
    for members in np.split(order, starts[1:]):
        if (taken == wanted).all():
            break
        of = strata[members]
        if len(members) == 1:
            fits = taken[of[0]] < wanted[of[0]]
        else:
            fits = (taken + np.bincount(of, minlength=len(rows)) <= wanted).all()
        if fits:
            held_out[members] = True
            np.add.at(taken, of, 1)
    return Split(held_out, rows, wanted, taken)


def _largest_remainder(rows: NDArray[np.int64], fraction: float) -> NDArray[np.int64]:
    """Whole numbers that add up to the rounded share of all rows, each within 1 of its own share."""
    exact = rows * fraction
    numbers = np.floor(exact).astype(np.int64)
    missing = round(float(rows.sum()) * fraction) - int(numbers.sum())
    order = np.lexsort((np.arange(len(rows)), -(exact - numbers)))
    numbers[order[:missing]] += 1
    return numbers


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> np.uint64(33)) * _MIX
    return values ^ values >> np.uint64(33)
