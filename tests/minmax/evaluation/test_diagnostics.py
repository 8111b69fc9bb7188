"""Effects of critiques, calibration curves and oscillation, by hand."""

import math
import random

import pytest
import torch

from rlhf_eval import expected_calibration_error
from rlhf_minmax.evaluation.diagnostics import (
    calibration_curve,
    critique_effects,
    distinct_share,
    mean_length,
    oscillation,
)


def effects(with_critique, without, labels):
    return critique_effects(
        torch.tensor(with_critique), torch.tensor(without), torch.tensor(labels, dtype=torch.bool)
    )


def test_effects_by_hand():
    # e = 0.5, -1 on right answers, -2, 0, 0.25 on wrong ones: means -0.25 and -7/12, over all -0.45.
    # Of the right answers the second is slandered; of the wrong ones the last two are missed.
    found = effects([1.5, 0.0, -1.0, 1.0, 1.25], [1.0] * 5, [True, True, False, False, False])
    expected = {
        "critique_effect": -0.45,
        "critique_effect_right": -0.25,
        "critique_effect_wrong": -1.75 / 3,
        "slander_rate": 1 / 2,
        "miss_rate": 2 / 3,
    }
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_truthful_monitor_neither_slanders_nor_misses():
    found = effects([1.0, -1.0], [0.0, 0.0], [True, False])
    assert (found["slander_rate"], found["miss_rate"]) == (0, 0)
    assert effects([-1.0, 1.0], [0.0, 0.0], [True, False])["slander_rate"] == 1


def test_rounding_is_no_effect():
    for effect, rates in ((-1e-6, (0, 1)), (-1e-4, (0, 1)), (-1.05e-4, (1, 0))):
        found = effects([effect, effect], [0.0, 0.0], [True, False])
        assert (found["slander_rate"], found["miss_rate"]) == rates


def test_a_class_without_answers_has_no_rate():
    only_right = effects([1.0], [0.0], [True])
    assert only_right["miss_rate"] is only_right["critique_effect_wrong"] is None
    assert only_right["critique_effect"] == only_right["critique_effect_right"] == 1
    assert set(effects([], [], []).values()) == {None}


def test_distinct_texts_and_lengths():
    assert distinct_share(["a", "b", "a", "c"]) == 0.75
    assert mean_length([[1, 2, 3], [1]]) == 2
    assert distinct_share([]) is mean_length([]) is None


def test_oscillation_by_hand():
    assert oscillation([0.0, 1.0, 2.0, 5.0]) == 0
    assert oscillation([0.0, 1.0, 0.0, 1.0]) == 1
    # Differences 1, 1, -1, -1, 1: signs change at two of four places; standing still counts nowhere.
    assert oscillation([0.0, 1.0, 2.0, 1.0, 0.0, 1.0]) == 0.5
    assert oscillation([0.0, 1.0, 1.0, 2.0, 1.0, 0.0, 0.0, 1.0]) == 0.5
    assert oscillation([0.0, 1.0, 1.0]) is oscillation([3.0, 3.0, 3.0]) is oscillation([]) is None


def test_oscillation_is_blind_to_scale_and_two_thirds_of_noise():
    rng = random.Random(0)
    noise = [rng.random() for _ in range(20_000)]
    found = oscillation(noise)
    assert found is not None and found == oscillation([8 * x for x in noise])
    # The number of turning points of n values has variance (16 n - 29) / 90: deviation 0.003 of the share.
    assert found == pytest.approx(2 / 3, abs=4 * math.sqrt(16 / 90 / len(noise)))


def test_the_calibration_curve_by_hand():
    # Two bins: 0 and 0.4 below, of which one is positive; 0.5 and 1 above, both positive. One bin: all four.
    probabilities, labels = [0.0, 0.5, 0.4, 1.0], [False, True, True, True]
    low, high = calibration_curve(probabilities, labels, num_bins=2)
    assert low == pytest.approx((0.2, 0.5, 2))
    assert high == pytest.approx((0.75, 1.0, 2))
    assert calibration_curve(probabilities, labels, num_bins=1) == [pytest.approx((0.475, 0.75, 4))]


def test_the_curve_has_the_bins_of_the_calibration_error():
    rng = random.Random(1)
    probabilities = [rng.random() for _ in range(200)]
    labels = [rng.random() < p**2 for p in probabilities]
    curve = calibration_curve(probabilities, labels)
    assert len(curve) == 10 and sum(bin.count for bin in curve) == 200
    gaps = [count * abs(p - y) for p, y, count in curve if p is not None and y is not None]
    assert sum(gaps) / 200 == pytest.approx(expected_calibration_error(probabilities, labels))


def test_empty_bins_have_no_means():
    assert calibration_curve([0.9], [True], num_bins=2)[0] == (None, None, 0)
    assert calibration_curve([], [], num_bins=3) == [(None, None, 0)] * 3


@pytest.mark.parametrize(
    ("probabilities", "labels", "bins"), [([1.1], [True], 2), ([0.5], [True], 0), ([0.5], [], 2)]
)
def test_bad_input_of_the_curve_is_refused(probabilities, labels, bins):
    with pytest.raises(ValueError):
        calibration_curve(probabilities, labels, num_bins=bins)
