"""Algorithms compared over few seeds: interquartile mean and probability of improvement."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from rlhf_eval.stats.interval import RESAMPLES, Interval, check_level, percentile, t_quantile


def iqm(scores: ArrayLike) -> float:
    """Interquartile mean: the mean of the middle half of all scores, a quarter cut off at either end.

    Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice", section 4.3,
    https://arxiv.org/abs/2108.13264. Of n scores ⌊n/4⌋ are cut off at each end, as in rliable.

    Args:
        scores: Of any shape; NaN without scores.
    """
    found = np.sort(np.asarray(scores, dtype=float), axis=None)
    cut = len(found) // 4
    return float(found[cut : len(found) - cut].mean()) if len(found) else math.nan


def iqm_interval(
    scores: ArrayLike,
    *,
    resample_prompts: bool = False,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Interquartile mean of runs × tasks, with the stratified bootstrap: each task's runs are resampled.

    Agarwal et al. 2021, section 4.1. Tasks are fixed there: the interval is about other seeds on these tasks.
    With `resample_prompts` whole runs and whole columns are drawn instead, because a run answers all prompts:
    the interval is about other seeds and other prompts (Owen 2007, "The pigeonhole bootstrap",
    https://doi.org/10.1214/07-AOAS122, whose standard error is conservative). It is Student's, with one
    degree of freedom fewer than runs, because the spread of a few seeds is uncertain.

    Args:
        scores: (runs, tasks) one score of each run on each task, or on each prompt.
        resample_prompts: Whether columns are a sample too.
        level: Nominal coverage.
        resamples: Number of resamples.
        seed: Seed of the resamples.

    Raises:
        ValueError: not a table of finite numbers, or fewer than two runs.
    """
    check_level(level)
    table = _runs(scores)
    rng = np.random.default_rng(seed)
    runs, tasks = table.shape
    drawn = np.empty(resamples)
    for i in range(resamples):
        if resample_prompts:
            rows, columns = rng.integers(0, runs, (runs, 1)), rng.integers(0, tasks, (1, tasks))
        else:
            rows, columns = rng.integers(0, runs, (runs, tasks)), np.arange(tasks)[None]
        drawn[i] = iqm(table[rows, columns])
    estimate, error = iqm(table), float(drawn.std())
    if not resample_prompts:
        ends = percentile(drawn, level)
        return Interval(estimate, *ends, level, "stratified bootstrap", "run within task", runs, error)
    half = t_quantile((1 + level) / 2, runs - 1) * error
    method, unit = "two-way bootstrap, t", "run and prompt"
    return Interval(estimate, estimate - half, estimate + half, level, method, unit, runs, error)


def probability_of_improvement(
    first: ArrayLike, second: ArrayLike, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """P(a run of the first algorithm beats one of the second on a task), ties ½, mean over tasks.

    Agarwal et al. 2021, section 4.3: the Mann-Whitney statistic of each task, with the stratified bootstrap
    of both algorithms' runs.

    Args:
        first: (runs, tasks) scores of one algorithm.
        second: (runs, tasks) of the other, of the same tasks; the number of runs may differ.
        level: Nominal coverage.
        resamples: Number of resamples.
        seed: Seed of the resamples.

    Raises:
        ValueError: other tasks, or see `iqm_interval`.
    """
    check_level(level)
    a, b = _runs(first), _runs(second)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"got {a.shape[1]} and {b.shape[1]} tasks; both algorithms need the same")
    rng = np.random.default_rng(seed)
    tasks = np.arange(a.shape[1])[None]
    better = (np.sign(a[:, None] - b[None]) + 1) / 2  # (runs of a, runs of b, tasks)
    drawn = np.empty(resamples)
    for i in range(resamples):
        of_a = rng.integers(0, len(a), (len(a), a.shape[1]))
        of_b = rng.integers(0, len(b), (len(b), b.shape[1]))
        drawn[i] = better[of_a[:, None], of_b[None], tasks[None]].mean()
    ends = percentile(drawn, level)
    n = len(a) + len(b)
    method = "stratified bootstrap"
    return Interval(float(better.mean()), *ends, level, method, "run within task", n, float(drawn.std()))


def _runs(scores: ArrayLike) -> np.ndarray:
    table = np.asarray(scores, dtype=float)
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not np.isfinite(table).all() or len(table) < 2:
        raise ValueError("scores must be finite numbers of shape (runs, tasks), of two runs at least")
    return table
