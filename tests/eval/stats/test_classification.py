"""Golden and property tests of the metrics."""

import math
import random

import numpy as np
import pytest
from scipy import stats as oracle

from rlhf_eval import (
    auroc,
    balanced_accuracy,
    brier_score,
    expected_calibration_error,
    rate,
    true_negative_rate,
    true_positive_rate,
)
from rlhf_eval.stats import debiased_calibration_error, equal_count_calibration_error

LABELS = [True, True, True, True, False, False]
# Positives: right, right, right, unparsed -> TPR 3/4. Negatives: right, wrong -> TNR 1/2.
PREDICTIONS = [True, True, True, None, False, True]


def test_class_recalls_and_their_mean():
    assert true_positive_rate(PREDICTIONS, LABELS) == pytest.approx(3 / 4)
    assert true_negative_rate(PREDICTIONS, LABELS) == pytest.approx(1 / 2)
    assert balanced_accuracy(PREDICTIONS, LABELS) == pytest.approx((3 / 4 + 1 / 2) / 2)


def test_none_is_wrong_for_both_classes():
    assert true_positive_rate([None], [True]) == 0
    assert true_negative_rate([None], [False]) == 0


def test_constant_prediction_scores_half_on_unequal_classes():
    assert balanced_accuracy([True] * 6, LABELS) == 0.5
    assert balanced_accuracy([False] * 6, LABELS) == 0.5


def test_swapping_the_classes_swaps_the_recalls():
    swapped = [None if made is None else not made for made in PREDICTIONS]
    opposite = [not label for label in LABELS]
    assert true_negative_rate(swapped, opposite) == true_positive_rate(PREDICTIONS, LABELS)
    assert balanced_accuracy(swapped, opposite) == balanced_accuracy(PREDICTIONS, LABELS)


def test_one_class_alone():
    assert balanced_accuracy([True, False], [True, True]) == 0.5
    assert math.isnan(true_negative_rate([True, False], [True, True]))
    assert math.isnan(balanced_accuracy([], []))


def test_brier_score_golden():
    # ((0.9 - 1)^2 + (0.2 - 0)^2 + (0.6 - 0)^2) / 3 = (0.01 + 0.04 + 0.36) / 3
    assert brier_score([0.9, 0.2, 0.6], [True, False, False]) == pytest.approx(0.41 / 3)
    assert brier_score([0.5] * 4, [True, False, True, True]) == 0.25
    assert brier_score([1.0, 0.0], [False, True]) == 1


def test_expected_calibration_error_golden():
    # Two bins, each of weight 2/4. [0, .5): p .1 .3, y 0 1 -> |.2 - .5| = .3. [.5, 1]: p .5 1, y 1 1 -> .25.
    p, y = [0.1, 0.3, 0.5, 1.0], [False, True, True, True]
    assert expected_calibration_error(p, y, num_bins=2) == pytest.approx(0.5 * 0.3 + 0.5 * 0.25)
    # One bin: |mean p - mean y| = |.475 - .75|.
    assert expected_calibration_error(p, y, num_bins=1) == pytest.approx(0.275)


def test_calibrated_probabilities_have_no_calibration_error():
    assert expected_calibration_error([0.25] * 4, [True, False, False, False]) == pytest.approx(0)
    assert expected_calibration_error([0.0, 1.0], [False, True]) == 0


def test_auroc_golden_with_a_tie():
    # Pairs (positive, negative): .9>.4, .9>.1, .4=.4 counts half, .4>.1 -> 3.5 of 4.
    assert auroc([0.9, 0.4, 0.4, 0.1], [True, True, False, False]) == pytest.approx(3.5 / 4)
    assert auroc([1, 2, 3], [False, False, True]) == 1
    assert auroc([1, 2, 3], [True, False, False]) == 0
    assert auroc([7, 7, 7], [True, False, False]) == 0.5


def test_auroc_equals_counting_pairs():
    rng = random.Random(0)
    scores = [rng.randrange(6) for _ in range(60)]
    labels = [rng.random() < 0.4 for _ in range(60)]
    pairs = [
        (a, b)
        for a, la in zip(scores, labels, strict=True)
        for b, lb in zip(scores, labels, strict=True)
        if la > lb
    ]
    expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    assert auroc(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_rate_leaves_out_what_does_not_apply():
    assert rate([True, False, None, True]) == pytest.approx(2 / 3)
    assert math.isnan(rate([None, None]))
    assert math.isnan(rate([]))


def test_undefined_values_are_nan():
    assert math.isnan(auroc([0.1, 0.2], [True, True]))
    assert math.isnan(brier_score([], []))
    assert math.isnan(expected_calibration_error([], []))


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="2 predictions for 1 labels"):
        balanced_accuracy([True, False], [True])
    with pytest.raises(ValueError, match=r"probabilities must be in \[0, 1\], got 1.5"):
        brier_score([1.5], [True])
    with pytest.raises(ValueError, match="probabilities"):
        brier_score([math.nan], [True])
    with pytest.raises(ValueError, match="num_bins"):
        expected_calibration_error([0.5], [True], num_bins=0)
    with pytest.raises(ValueError, match="finite"):
        auroc([math.nan, 1.0], [True, False])


def test_equal_count_bins_by_hand() -> None:
    # Bins {.1, .2} and {.6, .9}: |.15 − 0| and |.75 − .5|, half the rows each.
    assert equal_count_calibration_error(
        [0.9, 0.1, 0.6, 0.2], [True, False, False, False], num_bins=2
    ) == pytest.approx(0.2)
    # Squares less ȳ(1 − ȳ)/(n − 1): .0225 − 0 and .0625 − .25, of which the mean is below 0.
    assert debiased_calibration_error([0.9, 0.1, 0.6, 0.2], [True, False, False, False], num_bins=2) == 0
    # One bin of mean .95 with one of four true: (.95 − .25)² less .25 · .75 / 3 = .0625.
    assert debiased_calibration_error(
        [0.9, 0.9, 1, 1], [True, False, False, False], num_bins=1
    ) == pytest.approx((0.49 - 0.0625) ** 0.5)
    assert math.isnan(equal_count_calibration_error([], [])) and math.isnan(
        debiased_calibration_error([], [])
    )


def test_a_calibrated_model_has_no_debiased_error() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(2000)
    labels = rng.random(2000) < p
    plain = equal_count_calibration_error(p, labels, num_bins=40)
    assert debiased_calibration_error(p, labels, num_bins=40) < 0.03 < plain


def test_scipy_agrees() -> None:
    rng = np.random.default_rng(1)
    p = np.round(rng.random(500), 2)
    labels = rng.random(500) < p**2
    pairs = labels.sum() * (~labels).sum()
    assert auroc(p, labels) == pytest.approx(oracle.mannwhitneyu(p[labels], p[~labels]).statistic / pairs)
    assert brier_score(p, labels) == pytest.approx(np.square(p - labels).mean())
    for strategy, ours in (
        ("uniform", expected_calibration_error),
        ("quantile", equal_count_calibration_error),
    ):
        distinct = p + rng.permutation(500) * 1e-9 if strategy == "quantile" else p
        edges = (
            np.linspace(0, 1, 6) if strategy == "uniform" else np.percentile(distinct, np.linspace(0, 100, 6))
        )
        bins = np.digitize(distinct, edges[1:-1])
        counts = np.bincount(bins, minlength=5)
        true, predicted = (np.bincount(bins, values, 5) / counts for values in (labels, distinct))
        expected = float((counts / 500 * np.abs(true - predicted)).sum())
        assert ours(distinct.clip(0, 1), labels, num_bins=5) == pytest.approx(expected, abs=5e-3)
