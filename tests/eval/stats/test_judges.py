"""Agreement and corrections: by hand, by other ways to compute them, and against what was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_eval.stats import cohen_kappa, corrected_rate, mean_interval, prediction_powered


def test_kappa_by_hand_and_from_the_table() -> None:
    # Agreement 3/4; chance .5 * .75 + .5 * .25 = .5; kappa .5
    assert cohen_kappa(["A", "A", "B", "B"], ["A", "A", "A", "B"]).estimate == pytest.approx(0.5)
    rng = np.random.default_rng(0)
    first = rng.choice(["A", "B", "tie"], 200).tolist()
    second = [verdict if rng.random() < 0.5 else str(rng.choice(["A", "B", "tie"])) for verdict in first]
    found = cohen_kappa(first, second)
    kinds = ["A", "B", "tie"]
    pairs = list(zip(first, second, strict=True))
    table = np.array([[pairs.count((a, b)) for b in kinds] for a in kinds])
    chance = table.sum(0) @ table.sum(1) / 200**2
    assert found.estimate == pytest.approx((np.trace(table) / 200 - chance) / (1 - chance))
    assert found.low < found.estimate < found.high
    assert cohen_kappa([1, 0], [1, 0], resamples=50).estimate == 1
    assert math.isnan(cohen_kappa(["A"], ["A"]).estimate)
    with pytest.raises(ValueError):
        cohen_kappa(["A"], [])


def test_a_rate_is_corrected_by_hand() -> None:
    # q = .5; sensitivity 4/5, specificity 9/10: (.5 + .9 − 1) / (.8 + .9 − 1) = 4/7
    labels = [True] * 5 + [False] * 10
    judged = [True] * 4 + [False] + [True] + [False] * 9
    found = corrected_rate([True, False] * 50, judged, labels)
    assert found.estimate == pytest.approx(4 / 7) and found.low < 0.5 < found.high
    perfect = corrected_rate(
        [True] * 30 + [False] * 70, [True] * 500 + [False] * 500, [True] * 500 + [False] * 500
    )
    assert perfect.estimate == pytest.approx(0.3)
    for gold in ([True] * 15, [False] * 15):
        with pytest.raises(ValueError):
            corrected_rate([True], judged, gold)
    with pytest.raises(ValueError):
        corrected_rate([True], [not each for each in labels], labels)
    with pytest.raises(ValueError):
        corrected_rate([], labels, labels)


def test_the_interval_of_lang_and_reiczigel_by_hand() -> None:
    # q = .5 of 100, sensitivity (8 + 1)/12 = .75, specificity (18 + 1)/22 = .8636: θ = .3636/.6136 = .59259.
    # Shift 2 · 3.8415 · (.59259 · .015625 − .40741 · .0053531) = .05438; standard error
    # √(.25/103.84 + .35117 · .015625 + .16598 · .0053531) / .6136 = .15273; ends .64698 ∓ 1.96 · .15273.
    gold = [True] * 8 + [False] * 2, [True] * 2 + [False] * 18
    found = corrected_rate([True, False] * 50, [*gold[0], *gold[1]], [True] * 10 + [False] * 20)
    assert (found.low, found.high) == pytest.approx((0.34764, 0.94631), abs=1e-5)


def test_predictions_take_out_their_own_bias_and_narrow_the_interval() -> None:
    rng = np.random.default_rng(1)
    labels = rng.normal(2, 1, 5000)
    judge = labels + 1 + rng.normal(0, 0.3, 5000)
    found = prediction_powered(judge[200:], judge[:200], labels[:200])
    alone = mean_interval(labels[:200])
    assert found.low <= 2 <= found.high
    assert found.high - found.low < 0.5 * (alone.high - alone.low)
    useless = prediction_powered(rng.normal(0, 1, 5000), rng.normal(0, 1, 200), labels[:200])
    assert useless.high - useless.low == pytest.approx(alone.high - alone.low, rel=0.1)
    with pytest.raises(ValueError):
        prediction_powered([1.0], [1.0], [1.0, 2.0])
