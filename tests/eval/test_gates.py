"""Gates: what passes, fails and is left open; how often no change fails, and how often a drop is found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from raises import raises_error
from rlhf_eval.gates import Gate, judge_gates, rows_to_find_drop, verdict_of_all

SUITES = ("stories", "sums", "copying", "instructions", "refusals", "text")


def scores(values: object) -> dict[str, float]:
    return {str(i): float(value) for i, value in enumerate(np.asarray(values, dtype=float))}


def one(gate: Gate, new: object, old: object = None):
    others = {} if old is None else {str(gate.against): {gate.metric: scores(old)}}
    (found,) = judge_gates([gate], {gate.metric: scores(new)}, others)
    return found


def pair(rng: np.random.Generator, rows: int, drop: float, changed: float = 0.2) -> tuple[np.ndarray, ...]:
    """Right and wrong answers before and after: a share `changed` differs, and the mean falls by `drop`."""
    old = rng.random(rows) < 0.6
    lost, won = (changed + drop) / 2, (changed - drop) / 2  # shares of all rows that turn wrong, and right
    turned = np.where(old, rng.random(rows) < lost / 0.6, rng.random(rows) < won / 0.4)
    return old ^ turned, old


def test_a_threshold_on_the_mean_passes_fails_and_stays_open() -> None:
    gate = Gate(metric="reward_accuracy", op=">=", threshold=0.65)
    assert one(gate, [1] * 90 + [0] * 10).outcome == "pass"
    assert one(gate, [1] * 40 + [0] * 60).outcome == "fail"
    open_ = one(gate, [1] * 70 + [0] * 30)
    # z = 1.645 + 0.842 = 2.486; sd² = .7 · .3 = .21; 2.486² · .21 / .05² = 519.3, so 520 rows, 420 more
    assert (open_.outcome, open_.missing_rows) == ("inconclusive", 420)


def test_less_is_better_where_the_operator_says_so() -> None:
    gate = Gate(metric="kl", op="<=", threshold=10.0)
    rng = np.random.default_rng(0)
    assert one(gate, rng.normal(5, 2, 100)).outcome == "pass"
    worse = one(gate, rng.normal(15, 2, 100))
    assert worse.outcome == "fail" and worse.low < worse.estimate < worse.high
    assert worse.estimate == pytest.approx(15, abs=1)


def test_non_inferiority_needs_rows_and_says_how_many() -> None:
    gate = Gate(metric="stories", against="start", margin=0.02)
    rng = np.random.default_rng(1)
    new, old = pair(rng, 200, 0.0)
    found = one(gate, new, old)
    assert found.outcome == "inconclusive" and found.missing_rows is not None
    needed = 200 + found.missing_rows
    passes = sum(one(gate, *pair(rng, needed, 0.0)).outcome == "pass" for _ in range(100))
    assert passes >= 70  # planned for 80


def test_an_unchanged_model_passes_with_few_rows() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=50)
    assert one(Gate(metric="text", against="previous", margin=0.02), values, values).outcome == "pass"
    right = rng.random(200) < 0.5
    assert one(Gate(metric="sums", against="previous", margin=0.02), right, right).outcome == "pass"


def test_a_loss_within_the_margin_never_fails() -> None:
    rng = np.random.default_rng(3)
    old = rng.normal(size=5000)
    found = one(
        Gate(metric="text", against="previous", margin=0.1), old - 0.05 + 0.01 * rng.normal(size=5000), old
    )
    assert found.outcome == "pass"


@pytest.mark.slow
def test_no_change_fails_in_at_most_five_percent_of_simulations() -> None:
    """1,000 simulated models no better and no worse, on six suites each; two standard errors are allowed."""
    rng = np.random.default_rng(4)
    gate = Gate(metric="suites", against="previous", margin=0.02)
    failed = 0
    for _ in range(1000):
        both = {suite: pair(rng, 200, 0.0) for suite in SUITES}
        new, old = ({suite: scores(found[i]) for suite, found in both.items()} for i in (0, 1))
        failed += verdict_of_all(judge_gates([gate], new, {"previous": old}, suites=SUITES)) == "fail"
    assert failed <= 50


@pytest.mark.slow
def test_a_drop_of_five_points_is_found_at_the_stated_number_of_rows() -> None:
    """In one of six suites; 200 simulations, of which 80% less two standard errors have to find it."""
    rows = rows_to_find_drop(0.05, changed=0.2, suites=len(SUITES))
    rng, gate, found = np.random.default_rng(5), Gate(metric="suites", against="previous", margin=0.02), 0
    for _ in range(200):
        both = {suite: pair(rng, rows, 0.05 if suite == "sums" else 0.0) for suite in SUITES}
        new, old = ({suite: scores(each[i]) for suite, each in both.items()} for i in (0, 1))
        found += verdict_of_all(judge_gates([gate], new, {"previous": old}, suites=SUITES)) == "fail"
    # (z(1 − .05/6) + z(.8))² (.2 − .05²) / .05² = (2.394 + .842)² · 79 = 827.1
    assert rows == 828
    assert found >= 0.743 * 200


def test_verdicts_of_several_gates_are_one() -> None:
    rng = np.random.default_rng(6)
    reward = {"reward": scores(rng.normal(1, 1, 300))}
    gates = [Gate(metric="reward", op=">", threshold=0.5), Gate(metric="reward", op="<", threshold=0.0)]
    found = judge_gates(gates, reward)
    assert [each.outcome for each in found] == ["pass", "fail"]
    assert verdict_of_all(found) == "fail"


def test_rates_of_different_rows_are_compared_by_their_own_intervals() -> None:
    """An answer is rated by whoever got it: the two files share no rows."""
    gate = Gate(metric="rating", against="start", margin=0.1)

    def found(new: list[int], old: list[int], gate: Gate = gate):
        others = {"start": {"rating": scores(old)}}
        return judge_gates([gate], {"rating": scores(new)}, others, unpaired=("rating",))[0]

    same = found([1] * 240 + [0] * 60, [1] * 2400 + [0] * 600)
    # Wilson at 90%: .8 - .7594 and .8117 - .8; square and add: hypot(.0406, .0117) = .0422 below 0
    assert same.outcome == "pass" and same.low == pytest.approx(-0.0422, abs=2e-4)
    assert (same.rows, same.other_rows) == (300, 3000)
    assert found([1] * 180 + [0] * 120, [1] * 2400 + [0] * 600).outcome == "fail"
    few = found([1] * 24 + [0] * 6, [1] * 2400 + [0] * 600)
    # .16/n + .16/3000 = (.1 / (1.645 + .842))² = .001617: n = .16 / .001564 = 102.3, so 103 rows, 73 more
    assert (few.outcome, few.missing_rows) == ("inconclusive", 73)
    # .25/100 alone is more than .001617: no number of the candidate's rows would do
    none = found([1] * 15 + [0] * 15, [1] * 50 + [0] * 50)
    assert (none.outcome, none.missing_rows, none.too_few_others) == ("inconclusive", None, True)
    assert "more of both" in none.reason
    complaints = Gate(metric="rating", against="start", op="<", threshold=0.0)
    assert found([1] * 10 + [0] * 290, [1] * 600 + [0] * 2400, complaints).outcome == "pass"


@pytest.mark.slow
def test_no_change_in_ratings_fails_in_at_most_five_percent_of_simulations() -> None:
    rng = np.random.default_rng(7)
    gate, failed = Gate(metric="rating", against="start", margin=0.02), 0
    for _ in range(1000):
        new, old = (scores(rng.random(rows) < 0.85) for rows in (150, 1500))
        others = {"start": {"rating": old}}
        failed += judge_gates([gate], {"rating": new}, others, unpaired=("rating",))[0].outcome == "fail"
    assert failed <= 50


def test_what_cannot_be_judged_is_refused() -> None:
    measured = {"reward": scores([0.1, 0.2])}
    gate = Gate(metric="reward", against="baseline", margin=0.1)
    with raises_error("missing_metric", metric="acuracy"):
        judge_gates([Gate(metric="acuracy", threshold=0.5)], measured)
    with raises_error("missing_comparison", against="baseline"):
        judge_gates([gate], measured, {"start": measured})
    with raises_error("unpaired_rows", shared=2):
        judge_gates([gate], measured, {"baseline": {"reward": scores([1, 2, 3])}})
    with raises_error("missing_metric", metric="suites"):
        judge_gates([Gate(metric="suites", against="start", margin=0.1)], measured)
    for wrong in ({"margin": 0.1}, {}, {"margin": 0.1, "threshold": 0.0, "against": "start"}):
        with raises_error("invalid_value"):
            Gate.from_dict({"metric": "reward", **wrong})


@pytest.mark.parametrize(
    ("right", "rows", "op", "threshold", "outcome"),
    [
        (25, 25, ">=", 0.9, "inconclusive"),  # .9^25 = .072
        (29, 29, ">=", 0.9, "pass"),  # .9^29 = .047
        (1, 20, ">=", 0.01, "inconclusive"),  # 1 - .99^20 = .18
        (19, 20, ">=", 0.99, "inconclusive"),  # P(X <= 19) = 1 - .99^20 = .18
        (4, 5, ">=", 0.99, "fail"),  # 1 - .99^5 = .049
        (0, 29, "<", 0.1, "pass"),
        (0, 28, "<", 0.1, "inconclusive"),  # .9^28 = .052
    ],
)
def test_shares_against_a_threshold_are_tested_exactly(
    right: int, rows: int, op: Any, threshold: float, outcome: str
) -> None:
    """Of independent rows the risk of a wrong verdict is a binomial's, also near 0 and 1."""
    gate = Gate(metric="rating", op=op, threshold=threshold)
    (found,) = judge_gates([gate], {"rating": scores([1] * right + [0] * (rows - right))})
    assert found.outcome == outcome
    if outcome == "fail":
        assert found.p_value == pytest.approx(1 - 0.99**5, abs=1e-6)


def test_rows_that_are_missing_are_those_that_the_exact_test_needs() -> None:
    gate = Gate(metric="rating", op=">=", threshold=0.9)
    (found,) = judge_gates([gate], {"rating": scores([1] * 20)})
    # .9^n < .05 from n = 29 on; one more for rounding
    assert found.missing_rows in (9, 10)


def test_chance_may_leave_open_what_as_many_rows_should_show() -> None:
    """One loss in 32 rows: by the normal approximation 10 rows show it, but these do not."""
    gate = Gate(metric="reward", against="start", margin=0.1)
    new, old = scores([0.0] + [1.0] * 31), scores([1.0] * 32)
    (found,) = judge_gates([gate], {"reward": new}, {"start": {"reward": old}})
    assert (found.outcome, found.missing_rows) == ("inconclusive", 0)


def test_a_mean_without_an_interval_has_none_in_its_reason() -> None:
    (found,) = judge_gates([Gate(metric="text", op=">=", threshold=-1.0)], {"text": scores([-2.5, -2.5])})
    assert math.isnan(found.low) and "nan" not in found.reason
