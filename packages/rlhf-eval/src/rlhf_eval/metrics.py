"""Classification, calibration and rate metrics on plain Python sequences.

Every function takes sequences of equal length `n` and returns a float. A prediction of None is one that
could not be parsed. A value that is undefined on the data (no row of a class, no rows that count) is
NaN, never an invented number; sequences of different lengths are a ValueError.
"""

from collections.abc import Sequence

import numpy as np


def true_positive_rate(predictions: Sequence[bool | None], labels: Sequence[bool]) -> float:
    """Share of the positives that were predicted positive (sensitivity, recall): TPR = TP / P.

    Args:
        predictions: (n,) predicted classes; None counts as wrong.
        labels: (n,) true classes.

    Returns:
        A number in [0, 1]; NaN without a positive label.

    Raises:
        ValueError: the lengths differ.
    """
    return _class_recall(predictions, labels, positive=True)


def true_negative_rate(predictions: Sequence[bool | None], labels: Sequence[bool]) -> float:
    """Share of the negatives that were predicted negative (specificity): TNR = TN / N.

    Args:
        predictions: (n,) predicted classes; None counts as wrong.
        labels: (n,) true classes.

    Returns:
        A number in [0, 1]; NaN without a negative label.

    Raises:
        ValueError: the lengths differ.
    """
    return _class_recall(predictions, labels, positive=False)


def balanced_accuracy(predictions: Sequence[bool | None], labels: Sequence[bool]) -> float:
    """Mean of the two classes' recalls: (TPR + TNR) / 2.

    A constant prediction scores 0.5 however unequal the classes are. Brodersen et al. 2010, "The
    balanced accuracy and its posterior distribution", https://doi.org/10.1109/ICPR.2010.764.

    Args:
        predictions: (n,) predicted classes; None counts as wrong.
        labels: (n,) true classes.

    Returns:
        A number in [0, 1]; with labels of one class only, that class's recall; NaN without rows.

    Raises:
        ValueError: the lengths differ.
    """
    recalls = [true_positive_rate(predictions, labels), true_negative_rate(predictions, labels)]
    present = [recall for recall in recalls if not np.isnan(recall)]
    return float(np.mean(present)) if present else float("nan")


def brier_score(probabilities: Sequence[float], labels: Sequence[bool]) -> float:
    """Mean squared error of probabilities: (1/n) Σ (p − y)². Lower is better; a constant 0.5 scores 0.25.

    Brier 1950, "Verification of forecasts expressed in terms of probability", Monthly Weather Review
    78(1), in the form for two classes (half of the paper's sum over both classes).

    Args:
        probabilities: (n,) probabilities of the positive class, in [0, 1].
        labels: (n,) true classes.

    Returns:
        A number in [0, 1]; NaN without rows.

    Raises:
        ValueError: the lengths differ or a probability is outside [0, 1].
    """
    p, y = _probabilities(probabilities, labels)
    return float(np.mean((p - y) ** 2)) if len(p) else float("nan")


def expected_calibration_error(
    probabilities: Sequence[float], labels: Sequence[bool], *, num_bins: int = 10
) -> float:
    """Distance between predicted and observed frequency: ECE = Σ_b (n_b / n) · |mean p_b − mean y_b|.

    Bins have equal width over [0, 1], b = min(⌊p · num_bins⌋, num_bins − 1), and p is the probability of
    the positive class. Naeini et al. 2015, "Obtaining well calibrated probabilities using Bayesian
    binning", https://doi.org/10.1609/aaai.v29i1.9602.

    Args:
        probabilities: (n,) probabilities of the positive class, in [0, 1].
        labels: (n,) true classes.
        num_bins: Number of bins, at least 1.

    Returns:
        A number in [0, 1]; NaN without rows.

    Raises:
        ValueError: the lengths differ, a probability is outside [0, 1], or `num_bins` is below 1.

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


def auroc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Area under the ROC curve: P(score of a positive > score of a negative) + ½ P(equal).

    Computed from mid-ranks: AUROC = (Σ ranks of the positives − P(P + 1)/2) / (P · N), the Mann-Whitney
    statistic. Hanley & McNeil 1982, "The meaning and use of the area under a receiver operating
    characteristic (ROC) curve", https://doi.org/10.1148/radiology.143.1.7063747.

    Args:
        scores: (n,) finite scores, higher meaning more likely positive.
        labels: (n,) true classes.

    Returns:
        A number in [0, 1]; NaN when a class has no row.

    Raises:
        ValueError: the lengths differ or a score is not finite.
    """
    _check_lengths(scores, labels)
    values, positive = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    if not np.isfinite(values).all():
        raise ValueError("scores must be finite; leave out the rows without a score")
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    mid_ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]
    excess = mid_ranks[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(excess / (num_positive * num_negative))


def rate(flags: Sequence[bool | None]) -> float:
    """Share of True among the flags that apply: hack rate, parse rate, win rate.

    Args:
        flags: (n,) outcomes; None marks a row to which the rate does not apply and which is left out.

    Returns:
        A number in [0, 1]; NaN when no flag applies.
    """
    counted = [bool(flag) for flag in flags if flag is not None]
    return sum(counted) / len(counted) if counted else float("nan")


def _class_recall(predictions: Sequence[bool | None], labels: Sequence[bool], *, positive: bool) -> float:
    _check_lengths(predictions, labels)
    pairs = zip(predictions, labels, strict=True)
    return rate(
        [made is not None and bool(made) == positive for made, label in pairs if bool(label) == positive]
    )


def _probabilities(probabilities: Sequence[float], labels: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    _check_lengths(probabilities, labels)
    p = np.asarray(probabilities, dtype=float)
    outside = p[~((p >= 0) & (p <= 1))]
    if len(outside):
        raise ValueError(f"probabilities must be in [0, 1], got {float(outside[0])!r}")
    return p, np.asarray(labels, dtype=float)


def _check_lengths(first: Sequence[object], labels: Sequence[object]) -> None:
    if len(first) != len(labels):
        raise ValueError(f"got {len(first)} predictions for {len(labels)} labels; one label each is expected")
