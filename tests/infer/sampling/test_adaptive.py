"""Where samples pay: gains against closed forms, greedy shares of a budget, bounds."""

from __future__ import annotations

import math
import random

import pytest

from rlhf_data import UserError
from rlhf_infer.sampling.budget import AdaptiveComputeAllocator, marginal_gains
from rlhf_infer.sampling.score_model import Predictive

PATTERN = (-1.0, -0.5, 0.0, 0.2, 0.6, 1.0)
WIDE, NARROW, SAME = [10 * x for x in PATTERN], [0.1 * x for x in PATTERN], [0.0] * 6


def test_gains_of_the_normal() -> None:
    # At z = 0 and u = 1: φ(0) = 0.3989423, and then ∫_0^∞ Φ(1 - Φ) = 1 / (2 √π) = 0.2820948.
    first, second, third = marginal_gains(Predictive(5.0, 1.0, 5.0, 2.0, 9), 3)
    assert (first / 2, second / 2) == (pytest.approx(0.3989423), pytest.approx(0.2820948))
    assert third < second
    # u std (φ(1) - Q(1)) = 0.5 · 2 · (0.2419707 - 0.1586553); z below 0: φ(1) + 1 · Q(-1) = 1.0833155.
    assert marginal_gains(Predictive(3.0, 0.5, 1.0, 2.0, 9), 1) == [pytest.approx(0.0833155, abs=1e-6)]
    assert marginal_gains(Predictive(-1.0, 1.0, 0.0, 1.0, 9), 1) == [pytest.approx(1.0833155, abs=1e-6)]
    assert marginal_gains(Predictive(3.0, 0.0, 1.0, 2.0, 9), 2) == [0.0, 0.0]


def test_gains_are_those_of_a_simulation() -> None:
    rng, known = random.Random(0), Predictive(0.5, 0.6, 0.0, 1.0, 9)
    gains = [0.0, 0.0, 0.0]
    for _ in range(20_000):
        best = known.best
        for k in range(3):
            score = rng.gauss(0, 1) if rng.random() < known.unseen else -9.0
            gains[k] += max(0.0, score - best) / 20_000
            best = max(best, score)
    assert marginal_gains(known, 3) == pytest.approx(gains, abs=0.01)


def test_the_first_samples_come_first() -> None:
    allocator = AdaptiveComputeAllocator(min_samples=3)
    assert allocator.next_samples([[], [1.0, 2.0], [0.0] * 5], 10) == [3, 1, 0]
    with pytest.raises(UserError, match="budget of 3 samples does not hold min_samples=3 of each of 3"):
        allocator.next_samples([[], [1.0, 2.0], [0.0] * 5], 3)


def test_samples_go_where_scores_spread() -> None:
    allocator = AdaptiveComputeAllocator(batch=4)
    wide, narrow, same = allocator.next_samples([WIDE, NARROW, SAME], 100)
    assert wide + narrow + same == 4 and wide > narrow and wide > same
    assert allocator.next_samples([SAME, WIDE, NARROW], 100) == [same, wide, narrow]
    # The unit of the scores does not matter, and a round gives no more than what is left.
    scaled = [[10 * x - 3 for x in scores] for scores in (WIDE, NARROW, SAME)]
    assert allocator.next_samples(scaled, 100) == [wide, narrow, same]
    assert sum(allocator.next_samples([WIDE, NARROW, SAME], 1)) == 1
    assert allocator.next_samples([WIDE, NARROW, SAME], 0) == [0, 0, 0]
    # One per prompt is the default.
    assert sum(AdaptiveComputeAllocator().next_samples([WIDE, NARROW, SAME], 100)) == 3


def test_a_prompt_behind_the_others_gets_more_than_one_ahead() -> None:
    others = [[0.0, 2.0, 1.0], [0.2, 1.9, 0.8], [-0.1, 2.2, 1.1]]
    allocator = AdaptiveComputeAllocator(min_samples=2, batch=2)
    assert allocator.next_samples([[0.0, 0.0], [2.0, 2.0], *others], 9) == [2, 0, 0, 0, 0]


def test_a_sure_policy_gets_nothing_more() -> None:
    sure, unsure = [math.log(p / 21) for p in range(1, 7)], [-30.0 - i for i in range(6)]
    allocator = AdaptiveComputeAllocator(batch=3)
    assert allocator.next_samples([WIDE, WIDE], 9, [sure, unsure]) == [0, 3]
    assert allocator.next_samples([WIDE, WIDE], 9, [sure, sure]) == [0, 0]


def test_bounds() -> None:
    assert AdaptiveComputeAllocator(batch=9, max_samples=7).next_samples([WIDE, WIDE], 9) == [1, 1]
    assert AdaptiveComputeAllocator(minimum_gain=100.0).next_samples([WIDE, NARROW], 9) == [0, 0]
    # Without a score there is nothing to expect but to find one.
    assert AdaptiveComputeAllocator(batch=2).next_samples([[None] * 6, SAME], 9) == [1, 1]
    assert AdaptiveComputeAllocator().next_samples([], 9) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_samples": 0}, "min_samples is 0"),
        ({"max_samples": 3}, "1 <= min_samples <= max_samples"),
        ({"batch": 0}, "batch is 0"),
        ({"minimum_gain": -0.1}, "minimum_gain is -0.1"),
    ],
)
def test_wrong_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AdaptiveComputeAllocator(**settings)  # pyright: ignore[reportArgumentType]
