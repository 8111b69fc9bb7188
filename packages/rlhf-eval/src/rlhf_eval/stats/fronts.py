"""Pareto fronts of several objectives, such as reward and KL, and their hypervolume."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def pareto_front(points: ArrayLike) -> list[int]:
    """Indices of the points that no other dominates: none is at least as good in all and better in one.

    Args:
        points: (n, d); more is better in every column, so give −KL for KL.

    Returns:
        Ascending indices; of equal points all.

    Raises:
        ValueError: not a table of finite numbers.
    """
    table = _points(points)
    return [
        i
        for i, point in enumerate(table)
        if not ((table >= point).all(axis=1) & (table > point).any(axis=1)).any()
    ]


def hypervolume(points: ArrayLike, reference: ArrayLike) -> float:
    """Volume of what the points dominate above a reference: the union of the boxes from it to each of them.

    Zitzler & Thiele 1998, "Multiobjective optimization using evolutionary algorithms"; by slices along the
    last objective. Exact; exponential in d, for few points or d up to 3.

    Args:
        points: (n, d); more is better in every column.
        reference: (d,); points that are not better in every column add nothing.

    Raises:
        ValueError: not finite, or another number of objectives.
    """
    table, corner = _points(points), np.asarray(reference, dtype=float)
    if corner.shape != table.shape[1:]:
        raise ValueError(f"got a reference of shape {corner.shape} for points of {table.shape[1]} objectives")
    return _volume(table[(table > corner).all(axis=1)], corner)


def _volume(points: np.ndarray, corner: np.ndarray) -> float:
    if not len(points):
        return 0.0
    if points.shape[1] == 1:
        return float(points.max() - corner[0])
    heights = np.unique(points[:, -1])
    bottoms = np.concatenate([corner[-1:], heights[:-1]])
    return sum(
        float(top - bottom) * _volume(points[points[:, -1] >= top, :-1], corner[:-1])
        for top, bottom in zip(heights, bottoms, strict=True)
    )


def _points(points: ArrayLike) -> np.ndarray:
    table = np.asarray(points, dtype=float)
    if table.ndim != 2 or not np.isfinite(table).all():
        raise ValueError("points must be finite numbers of shape (n, d)")
    return table
