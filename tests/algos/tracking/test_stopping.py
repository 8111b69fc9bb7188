"""Early stopping: the rule of transformers, and its state."""

from __future__ import annotations

import json
import math

import pytest

from rlhf_algos.tracking.early_stopping import EarlyStopping


def _stops(stopping, values):
    return [stopping.update(value) for value in values]


def test_stops_after_patience_evaluations_without_improvement():
    stopping = EarlyStopping("loss", patience=2)
    assert _stops(stopping, [1.0, 0.8, 0.9, 0.7, 0.7, 0.75]) == [False] * 5 + [True]
    assert stopping.best == 0.7


def test_direction_comes_from_the_name_or_the_argument():
    rising = [0.1, 0.2, 0.3]
    assert _stops(EarlyStopping("rewards/accuracies", patience=1), rising) == [False] * 3
    assert _stops(EarlyStopping("eval_loss", patience=1), rising) == [False, True, True]
    assert _stops(EarlyStopping("accuracy", patience=1, greater_is_better=False), rising) == [
        False,
        True,
        True,
    ]
    assert _stops(EarlyStopping("loss", patience=1, greater_is_better=True), rising) == [False] * 3


def test_small_gains_do_not_count_but_move_the_best():
    stopping = EarlyStopping("loss", patience=2, threshold=0.1)
    # 0.95 and 0.9 are better by less than 0.1 than the best before them
    assert _stops(stopping, [1.0, 0.95, 0.9]) == [False, False, True]
    assert stopping.best == 0.9


def test_nan_is_no_improvement():
    stopping = EarlyStopping("loss", patience=2)
    assert _stops(stopping, [math.nan, 0.5, math.nan, math.nan]) == [False, False, False, True]
    assert stopping.best == 0.5


def test_without_patience_it_never_stops_and_keeps_count():
    stopping = EarlyStopping()
    assert not any(_stops(stopping, [1.0] * 20)) and stopping.bad_evaluations == 19


def test_state_comes_back():
    first = EarlyStopping("loss", patience=3)
    _stops(first, [1.0, 2.0, 2.0])
    second = EarlyStopping("loss", patience=3)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.update(2.0) and second.best == 1.0


@pytest.mark.parametrize("options", [{"patience": 0}, {"threshold": -0.1}])
def test_bad_values_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EarlyStopping(**options)
