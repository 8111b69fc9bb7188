"""When sampling stops: first samples, rounds, repeats, sure policies, and how often it stops too early."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from rlhf_data import UserError
from rlhf_infer.sampling.confidence_stopping import ConfidenceBasedStopping
from rlhf_infer.sampling.score_model import ScorePopulation

RULE = ConfidenceBasedStopping(min_samples=4, max_samples=18, batch=4, probability=0.1)


def test_rounds() -> None:
    assert RULE.next_samples([]) == 4
    assert RULE.next_samples([1.0, 2.0, 3.0]) == 1
    assert RULE.next_samples([1.0, 2.0, 3.0, 4.0]) == 4
    assert RULE.next_samples([float(x) for x in range(16)]) == 2
    assert RULE.next_samples([float(x) for x in range(18)]) == 0
    assert RULE.next_samples([None] * 8) == 4


def test_chance_of_being_beaten() -> None:
    # Two distinct scores, each once: 1/3 a sample (see test_predictive), 16 samples to come.
    assert RULE.chance([0.0, 2.0]) == pytest.approx(1 - (2 / 3) ** 16)
    assert RULE.chance([]) == 1.0
    assert RULE.chance([1.0] * 18) == 0.0


def test_a_sure_policy_and_repeated_scores_stop_the_search() -> None:
    scores, unsure = [2.0, -1.0, 2.0, -1.0], [math.log(0.2)] * 4
    assert RULE.next_samples(scores, unsure) == 4
    # What is left to the policy is 0.004, of which a third is expected to be better: 14 · 0.004 / 3 = 0.02.
    sure = [math.log(0.6), math.log(0.396)] * 2
    assert RULE.next_samples(scores, sure) == 0
    long = [*[2.0] * 8, *[1.0] * 8]
    assert RULE.next_samples(long) == 0  # 0.5 / 16.5 unseen, a third of it better, 2 to come: 0.02


def test_tolerance_highest_and_probability() -> None:
    scores = [0.0, 0.1, 0.2, 0.3, 0.25, 0.15]
    assert RULE.next_samples(scores) == 4
    assert ConfidenceBasedStopping(4, 18, 4, 0.1, tolerance=1.0).next_samples(scores) == 0
    assert ConfidenceBasedStopping(4, 18, 4, 0.1, highest=0.3).next_samples(scores) == 0
    assert ConfidenceBasedStopping(4, 18, 4, 0.1, highest=0.31).next_samples(scores) == 4
    # Nothing is certain: with probability 0 all are drawn, however sure the policy is.
    never = ConfidenceBasedStopping(4, 18, 4, probability=0.0)
    assert never.next_samples([1.0] * 8, [0.0] * 8) == 4


def test_a_population_tells_a_good_first_score_from_a_bad_one() -> None:
    rule = ConfidenceBasedStopping(1, 8, 1, 0.1, population=ScorePopulation(0.0, 1.0, 0.0, 100))
    assert rule.next_samples([4.5]) == 0
    assert rule.next_samples([-1.0]) == 1


DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda rng: rng.gauss(0, 1),
    "uniform": lambda rng: rng.random(),
    "two values": lambda rng: float(rng.random() < 0.5),
    "rarely better": lambda rng: float(rng.random() < 0.1),
    "eight values": lambda rng: float(rng.randrange(8)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("tolerance", [0.0, 0.5])
def test_the_winner_of_a_stopped_search_is_seldom_beaten(name: str, tolerance: float) -> None:
    """Over many prompts, of those the rule decides, at most twice the stated share is beaten."""
    rng = random.Random(0)
    rule = ConfidenceBasedStopping(4, 32, 4, probability=0.2, tolerance=tolerance)
    beaten = drawn = 0
    for _ in range(400):
        scores = [DISTRIBUTIONS[name](rng) for _ in range(32)]
        count = 0
        while more := rule.next_samples(scores[:count]):
            count += more
        beaten += max(scores) > max(scores[:count]) + tolerance
        drawn += count
    assert beaten / 400 <= 0.4
    if name == "two values":
        assert beaten / 400 <= 0.05 and drawn / 400 < 18


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_samples": 0}, "min_samples is 0"),
        ({"min_samples": 20}, "1 <= min_samples <= max_samples"),
        ({"batch": 0}, "batch is 0"),
        ({"probability": 1.5}, "probability is 1.5"),
        ({"probability": math.nan}, "probability is nan"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"highest": math.nan}, "highest nan"),
    ],
)
def test_wrong_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConfidenceBasedStopping(**settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, (1.0, 0.99, 0.94, 0.87)),
        ({"tolerance": 1.0}, (0.96, 0.72, 0.59, 0.48)),
        ({"probability": 0.3, "tolerance": 0.5}, (0.88, 0.65, 0.56, 0.47)),
    ],
)
def test_share_that_is_drawn_of_normal_scores(settings: dict[str, float], shares: tuple[float, ...]) -> None:
    # The table of docs/best_of_n.md, of 600 prompts; 150 are enough to see that it is true.
    for most, expected in zip((8, 16, 32, 64), shares, strict=True):
        rng, drawn = np.random.default_rng(0), 0
        rule = ConfidenceBasedStopping(max_samples=most, **settings)  # pyright: ignore[reportArgumentType]
        for _ in range(150):
            values, scores = rng.normal(size=most).tolist(), []
            while count := rule.next_samples(scores, [-100.0] * len(scores)):
                scores += values[len(scores) : len(scores) + count]
            drawn += len(scores)
        assert drawn / (150 * most) == pytest.approx(expected, abs=0.06)
