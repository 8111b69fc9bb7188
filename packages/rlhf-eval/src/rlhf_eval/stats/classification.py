"""Classification, calibration and rate metrics on plain Python sequences.

All functions take (n,) predictions, probabilities of the positive class or scores, and (n,) true classes. A
prediction of None could not be parsed and counts as wrong. They return a number in [0, 1]: NaN where the data
do not define it, because there are no rows, or none of a class. They raise a ValueError where lengths differ,
a probability is outside [0, 1], a score is not finite, or `num_bins` is below 1.
"""

from collections.abc import Sequence, Sized

import numpy as np


def true_positive_rate(predictions: Sequence[bool | None], labels: Sequence[bool]) -> float:
    """Share of the positives that were predicted positive (sensitivity, recall): TPR = TP / P."""
    return _class_recall(predictions, labels, positive=True)


def true_negative_rate(predictions: Sequence[bool | None], labels: Sequence[bool]) -> float:
    """Share of the negatives that were predicted negative (specificity): TNR = TN / N."""
    return _class_recall(predictions, labels, positive=False)


def balanced_accuracy(predictions: Sequence[bool | None], labels: Sequence[bool]) -> float:
    """Mean of the two classes' recalls: (TPR + TNR) / 2.

    A constant prediction scores 0.5 however unequal the classes are; with labels of one class only it is that
    class's recall. Brodersen et al. 2010, "The balanced accuracy and its posterior distribution",
    https://doi.org/10.1109/ICPR.2010.764.
    """
    recalls = [true_positive_rate(predictions, labels), true_negative_rate(predictions, labels)]
    present = [recall for recall in recalls if not np.isnan(recall)]
    return float(np.mean(present)) if present else float("nan")


def brier_score(probabilities: Sequence[float] | np.ndarray, labels: Sequence[bool] | np.ndarray) -> float:
    """Mean squared error of probabilities: (1/n) Σ (p − y)². Lower is better; a constant 0.5 scores 0.25.

    Brier 1950, "Verification of forecasts expressed in terms of probability", Monthly Weather Review
    78(1), in the form for two classes (half of the paper's sum over both classes).
    """
    p, y = _probabilities(probabilities, labels)
    return float(np.mean((p - y) ** 2)) if len(p) else float("nan")


def expected_calibration_error(
    probabilities: Sequence[float] | np.ndarray, labels: Sequence[bool] | np.ndarray, *, num_bins: int = 10
) -> float:
    """Distance between predicted and observed frequency: ECE = Σ_b (n_b / n) · |mean p_b − mean y_b|.

    Bins have equal width over [0, 1], b = min(⌊p · num_bins⌋, num_bins − 1), and p is the probability of
    the positive class. Naeini et al. 2015, "Obtaining well calibrated probabilities using Bayesian
    binning", https://doi.org/10.1609/aaai.v29i1.9602.

    Note:
        The value depends on `num_bins`; compare only values computed with the same one.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins!r}")
    p, y = _probabilities(probabilities, labels)
    if not len(p):
        return float("nan")
    bins = np.minimum((p * num_bins).astype(int), num_bins - 1)
    gaps = np.bincount(bins, weights=p - y, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(p))


def equal_count_calibration_error(
    probabilities: Sequence[float] | np.ndarray, labels: Sequence[bool] | np.ndarray, *, num_bins: int = 10
) -> float:
    """The expected calibration error over bins with equally many rows: Σ_b (n_b / n) · |mean p_b − mean y_b|.

    Bins follow the sorted probabilities, so that none is empty where they cluster; equal ones may be split
    between bins, in the order given. Nguyen & O'Connor 2015, "Posterior calibration and exploratory
    analysis", https://arxiv.org/abs/1508.05154.
    """
    bins = _equal_count_bins(probabilities, labels, num_bins)
    rows = sum(len(p) for p, _ in bins)
    return float(sum(len(p) * abs(p.mean() - y.mean()) for p, y in bins) / rows) if rows else float("nan")


def debiased_calibration_error(
    probabilities: Sequence[float] | np.ndarray, labels: Sequence[bool] | np.ndarray, *, num_bins: int = 10
) -> float:
    """Root mean square calibration error over equal-count bins, with its bias from finite data removed.

    √max(0, Σ_b (n_b / n) [(mean p_b − mean y_b)² − mean y_b (1 − mean y_b) / (n_b − 1)]): a perfectly
    calibrated model has a plain error above 0 on finite data, and is 0 here on average before the root.
    Kumar, Liang & Ma 2019, "Verified uncertainty calibration", definition 4.1,
    https://arxiv.org/abs/1909.10155. A bin of one row adds 0.
    """
    bins = _equal_count_bins(probabilities, labels, num_bins)
    rows = sum(len(p) for p, _ in bins)
    if not rows:
        return float("nan")
    squares = [
        len(p) * ((p.mean() - y.mean()) ** 2 - y.mean() * (1 - y.mean()) / (len(p) - 1))
        for p, y in bins
        if len(p) > 1
    ]
    return float(max(0.0, sum(squares) / rows) ** 0.5)


def auroc(scores: Sequence[float] | np.ndarray, labels: Sequence[bool] | np.ndarray) -> float:
    """Area under the ROC curve: P(score of a positive > score of a negative) + ½ P(equal).

    Computed from mid-ranks: AUROC = (Σ ranks of the positives − P(P + 1)/2) / (P · N), the Mann-Whitney
    statistic. Hanley & McNeil 1982, "The meaning and use of the area under a receiver operating
    characteristic (ROC) curve", https://doi.org/10.1148/radiology.143.1.7063747.
    """
    _check_lengths(scores, labels)
    values, positive = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    if not np.isfinite(values).all():
        raise ValueError("scores must be finite; leave out the rows without a score")
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    excess = mid_ranks(values)[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(excess / (num_positive * num_negative))


def mid_ranks(values: np.ndarray) -> np.ndarray:
    """(n,) ranks from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


def rate(flags: Sequence[bool | None]) -> float:
    """Share of True among the flags that apply, those that are not None: hack rate, parse rate, win rate."""
    counted = [bool(flag) for flag in flags if flag is not None]
    return sum(counted) / len(counted) if counted else float("nan")


def _equal_count_bins(
    probabilities: Sequence[float] | np.ndarray, labels: Sequence[bool] | np.ndarray, num_bins: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins!r}")
    p, y = _probabilities(probabilities, labels)
    order = np.argsort(p, kind="stable")
    parts = [part for part in np.array_split(order, num_bins) if len(part)]
    return [(p[part], y[part]) for part in parts]


def _class_recall(predictions: Sequence[bool | None], labels: Sequence[bool], *, positive: bool) -> float:
    _check_lengths(predictions, labels)
    pairs = zip(predictions, labels, strict=True)
    return rate(
        [made is not None and bool(made) == positive for made, label in pairs if bool(label) == positive]
    )


def _probabilities(
    probabilities: Sequence[float] | np.ndarray, labels: Sequence[bool] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    _check_lengths(probabilities, labels)
    p = np.asarray(probabilities, dtype=float)
    outside = p[~((p >= 0) & (p <= 1))]
    if len(outside):
        raise ValueError(f"probabilities must be in [0, 1], got {float(outside[0])!r}")
    return p, np.asarray(labels, dtype=float)


def _check_lengths(first: Sized, labels: Sized) -> None:
    if len(first) != len(labels):
        raise ValueError(f"got {len(first)} predictions for {len(labels)} labels; one label each is expected")
