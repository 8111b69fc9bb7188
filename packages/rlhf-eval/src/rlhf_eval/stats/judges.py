"""Judges held against labels: agreement beyond chance, and rates corrected by a labelled slice."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from rlhf_eval.stats.differences import two_sample_difference
from rlhf_eval.stats.interval import (
    RESAMPLES,
    Interval,
    check_level,
    normal_quantile,
    percentile,
    unit_codes,
)


def cohen_kappa(
    first: Sequence[Hashable],
    second: Sequence[Hashable],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Agreement of two judges beyond what their habits alone would give: (p_o − p_e) / (1 − p_e).

    Cohen 1960, "A coefficient of agreement for nominal scales", https://doi.org/10.1177/001316446002000104.
    The rows are resampled.

    Args:
        first: (n,) verdicts of one judge, of any kind.
        second: (n,) of the other, on the same rows.
        level: Nominal coverage.
        resamples: Number of resamples.
        seed: Seed of the resamples.

    Returns:
        1 for full agreement, 0 for chance; NaN where both always gave the same verdict.

    Raises:
        ValueError: the lengths differ.
    """
    check_level(level)
    if len(first) != len(second):
        raise ValueError(f"got {len(first)} and {len(second)} verdicts; both judges judge every row")
    codes = unit_codes([*first, *second], 2 * len(first))
    kinds = int(codes.max()) + 1 if len(codes) else 0
    cells = codes[: len(first)] * kinds + codes[len(first) :]
    table = np.bincount(cells, minlength=kinds * kinds).astype(float)
    rng = np.random.default_rng(seed)
    n = len(first)
    drawn = rng.multinomial(n, table / n, resamples) if n else np.zeros((1, 0))
    kappas = _kappa(drawn.reshape(-1, kinds, kinds)) if n else np.array([math.nan])
    estimate = float(_kappa(table.reshape(1, kinds, kinds))[0]) if n else math.nan
    error = float(np.nanstd(kappas)) if np.isfinite(kappas).any() else math.nan
    return Interval(estimate, *percentile(kappas, level), level, "bootstrap", "row", n, error)


def corrected_rate(
    judged: ArrayLike,
    gold_judged: ArrayLike,
    gold_labels: ArrayLike,
    *,
    level: float = 0.95,
) -> Interval:
    """The true rate given a judge that errs: (q + specificity − 1) / (sensitivity + specificity − 1).

    Rogan & Gladen 1978, "Estimating prevalence from the results of a screening test"; the interval is that of
    Lang & Reiczigel 2014, "Confidence limits for prevalence of disease adjusted for estimated sensitivity and
    specificity", https://doi.org/10.1016/j.prevetmed.2013.09.015, which counts what the slice does not tell
    about the judge. For judges of language models: Lee et al. 2025, https://arxiv.org/abs/2511.21140.

    Args:
        judged: (n,) the judge's verdicts on the rows whose rate is estimated.
        gold_judged: (m,) its verdicts on a labelled slice, of both labels.
        gold_labels: (m,) the labels.
        level: Nominal coverage.

    Raises:
        ValueError: no verdicts, a slice without one of the labels, lengths that differ, or a judge that is
            not better than chance on the slice.
    """
    check_level(level)
    verdicts = np.asarray(judged, dtype=bool)
    if not verdicts.size:
        raise ValueError("the judge gave no verdict, so there is no rate to correct")
    on_gold, labels = np.asarray(gold_judged, dtype=bool), np.asarray(gold_labels, dtype=bool)
    if on_gold.shape != labels.shape or labels.all() or not labels.any():
        raise ValueError(
            "the labelled slice needs one verdict for each label, and rows that are true and that are false"
        )
    n, positives, negatives = len(verdicts), int(labels.sum()), int((~labels).sum())
    z = normal_quantile((1 + level) / 2)

    def rate(q: float, sensitivity: float, specificity: float) -> float:
        return (q + specificity - 1) / (sensitivity + specificity - 1)

    hits, rejections = int(on_gold[labels].sum()), int((~on_gold[~labels]).sum())
    if hits / positives + rejections / negatives <= 1:
        raise ValueError(
            "on the labelled slice the judge is no better than chance, so its verdicts are useless"
        )
    estimate = rate(verdicts.mean(), hits / positives, rejections / negatives)
    q, size = (verdicts.sum() + z * z / 2) / (n + z * z), n + z * z
    sensitivity, specificity = (hits + 1) / (positives + 2), (rejections + 1) / (negatives + 2)
    adjusted = rate(q, sensitivity, specificity)
    of_hits = sensitivity * (1 - sensitivity) / (positives + 2)
    of_rejections = specificity * (1 - specificity) / (negatives + 2)
    shift = 2 * z * z * (adjusted * of_hits - (1 - adjusted) * of_rejections)
    spread = q * (1 - q) / size + adjusted**2 * of_hits + (1 - adjusted) ** 2 * of_rejections
    error = math.sqrt(spread) / (sensitivity + specificity - 1)
    low, high = (min(max(float(adjusted + shift + side * z * error), 0.0), 1.0) for side in (-1, 1))
    estimate = min(max(float(estimate), 0.0), 1.0)
    return Interval(estimate, low, high, level, "Lang-Reiczigel", "row", n, error)


def prediction_powered(
    judged: ArrayLike,
    gold_judged: ArrayLike,
    gold_labels: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The mean label from a judge's scores of all rows and the labels of some: λ·mean(f) + mean(y − λf).

    Angelopoulos et al. 2023, "Prediction-powered inference", https://arxiv.org/abs/2301.09633, with the λ of
    least variance, cov(y, f) / ((1 + m/n) var(f)), of "PPI++", https://arxiv.org/abs/2311.01453, eq. 6. Never
    wider than the labels alone, but for the estimate of λ, however bad the judge.

    Args:
        judged: (n,) the judge's scores of the rows without a label.
        gold_judged: (m,) its scores of the labelled rows, which are a random part of all.
        gold_labels: (m,) their labels.
        level: Nominal coverage.
        resamples: Number of resamples, of both sets of rows.
        seed: Seed of the resamples.

    Raises:
        ValueError: the lengths differ or a number is not finite.
    """
    scores = np.asarray(judged, dtype=float)
    on_gold, labels = np.asarray(gold_judged, dtype=float), np.asarray(gold_labels, dtype=float)
    if on_gold.shape != labels.shape or len(labels) < 2:
        raise ValueError("the labelled slice needs one score for each label, and two rows at least")
    spread = np.concatenate([scores, on_gold]).var(ddof=1)
    covariance = float(np.cov(labels, on_gold)[0, 1])
    power = covariance / ((1 + len(labels) / max(len(scores), 1)) * spread) if spread > 0 else 0.0
    found = two_sample_difference(
        labels - power * on_gold, -power * scores, level=level, resamples=resamples, seed=seed
    )
    return replace(found, method=f"prediction-powered, {found.method}", p_value=None)


def _kappa(tables: np.ndarray) -> np.ndarray:
    """Of (resamples, kinds, kinds) counts."""
    n = tables.sum((1, 2))
    agreed = np.trace(tables, axis1=1, axis2=2) / n
    chance = (tables.sum(1) * tables.sum(2)).sum(1) / n**2
    with np.errstate(invalid="ignore", divide="ignore"):
        return (agreed - chance) / (1 - chance)
