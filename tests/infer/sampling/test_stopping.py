"""What scores say about the next ones: predictions, stopping early, sharing out a budget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from proofs import by_default
from raises import raises_error
from rlhf_infer.sampling.budget import AdaptiveComputeAllocator, MarginalGains
from rlhf_infer.sampling.confidence_stopping import ConfidenceBasedStopping
from rlhf_infer.sampling.score_model import Predictive, ScorePopulation, predict, student_tail, unseen_share


# 1 and 2 degrees of freedom have closed forms: 1/2 - atan(t)/π and 1/2 - t / (2 √(2 + t²)). The others are
# quantiles of printed tables: 2.5% at 3.182446 (3), 2.776445 (4), 5% at 1.894579 (7), 1% at 2.457262 (30).
@pytest.mark.parametrize(
    ("dof", "t", "tail"),
    [
        (1, 1.0, 0.25),
        (2, 1.0, 0.2113248654),
        (3, 3.182446, 0.025),
        (4, 2.776445, 0.025),
        (7, 1.894579, 0.05),
        (30, 2.457262, 0.01),
    ],
)
def test_students_tail(dof: int, t: float, tail: float) -> None:
    assert student_tail(t, dof) == pytest.approx(tail, abs=2e-7)
    assert student_tail(-t, dof) == pytest.approx(1 - tail, abs=2e-7)
    assert student_tail(0.0, dof) == pytest.approx(0.5) and student_tail(math.inf, dof) == pytest.approx(0)


def test_many_degrees_of_freedom_are_the_normal_tail() -> None:
    assert student_tail(1.5, 4001) == pytest.approx(math.erfc(1.5 / math.sqrt(2)) / 2, abs=1e-4)


# Of n scores f come once, (f + 1/2) / (n + 1/2). All differ: 3.5 / 3.5. All repeat: 0.5 / 4.5. One of three:
# 1.5 / 3.5. The one without a score does not count.
@pytest.mark.parametrize(
    ("scores", "share"),
    [([1.0, 2.0, 3.0], 1.0), ([5.0] * 4, 1 / 9), ([1.0, 1.0, 2.0], 3 / 7), ([1.0, None, 1.0], 0.2)],
)
def test_unseen_share_of_scores(scores: list[float | None], share: float) -> None:
    assert unseen_share(scores) == pytest.approx(share)


def test_unseen_share_is_what_the_policy_leaves_for_others() -> None:
    likely, rare = math.log(0.6), math.log(0.3)
    # Two completions, one of them twice, 0.6 + 0.3 of the probability; counts alone say 1.5 / 3.5.
    assert unseen_share([2.0, -1.0, 2.0], [likely, rare, likely]) == pytest.approx(0.1)
    # The same score, and log-probs that differ: two completions.
    assert unseen_share([2.0, 2.0], [likely, rare]) == pytest.approx(0.1)
    # Last bits that a batch changed make no new completion.
    assert unseen_share([2.0, 2.0 + 1e-6], [likely, likely + 1e-5]) == pytest.approx(0.2)
    assert unseen_share([2.0, 2.0], [math.log(0.9), math.log(0.5)]) == 0.0
    assert unseen_share([2.0, 3.0], [-800.0, -900.0]) == 1.0


def test_population_by_analysis_of_variance() -> None:
    # Means 1 and 5, W = (2 + 2) / (1 + 1) = 2, B = (2·2² + 2·2²) / 1 = 16, d₀ = 4 - 8/4 = 2,
    # between (16 - 2) / 2 = 7; variances 2 and 2 do not differ. Repeats and missing scores change nothing.
    population = ScorePopulation.fit([[0.0, 2.0, 2.0], [4.0, None, 6.0], []])
    assert population is not None and population.prior_samples == 100
    numbers = (population.mean, population.within, population.between)
    assert numbers == (pytest.approx(3), pytest.approx(2), pytest.approx(7))
    # Equal means: nothing between them.
    equal = ScorePopulation.fit([[0.0, 2.0], [0.5, 1.5]])
    assert equal is not None and equal.between == 0 and equal.mean == pytest.approx(1)
    alone = ScorePopulation.fit([[0.0, 2.0]])
    assert alone is not None and alone.between == math.inf
    assert ScorePopulation.fit([[1.0, 1.0], [2.0]]) is None


def test_population_of_prompts_whose_variances_differ() -> None:
    # Sums of squares 8 and 0.08 with 2 degrees of freedom: s² = 4 and 0.04, e = log s² - ψ(1) + log 1, so
    # ē = log 0.4 + γ and var(e) = log(100)² / 2 = 10.6; less ψ'(1) = 1.64 that is 8.96, above ψ'(1/2) = 4.93:
    # one prior sample, and within = 0.4 · exp(γ + ψ(1/2) - log(1/2)) = 0.4 · exp(-log 2) = 0.2.
    population = ScorePopulation.fit([[0.0, 2.0, 4.0], [1.8, 2.0, 2.2]])
    assert population is not None and population.prior_samples == 1
    assert population.within == pytest.approx(0.2)
    # The wide prompt keeps its spread and the narrow one its own.
    wide, narrow = (predict(x, population=population) for x in ([0.0, 2.0, 4.0], [1.8, 2.0, 2.2]))
    assert wide is not None and narrow is not None and wide.std > 5 * narrow.std


def test_a_population_is_found_again() -> None:
    rng = random.Random(0)
    groups = []
    for _ in range(2000):
        # 10 prior samples of variance 4: σ² = 4 · 10 / χ²(10), χ²(k) being a gamma of k/2 with scale 2.
        mean, std = rng.gauss(1, 3), math.sqrt(40 / rng.gammavariate(5, 2))
        groups.append([rng.gauss(mean, std) for _ in range(rng.choice([6, 12]))])
    population = ScorePopulation.fit(groups)
    assert population is not None
    assert population.mean == pytest.approx(1, abs=0.3) and population.between == pytest.approx(9, rel=0.15)
    assert population.within == pytest.approx(4, rel=0.15) and 7 <= population.prior_samples <= 14


def test_prediction_from_the_prompt_alone() -> None:
    # x̄ = 1, s² = 2, std = √(2 · 3/2) = √3; z = 1/√3 with one degree of freedom: 1/2 - (π/6)/π = 1/3, which
    # is also the chance that the third of three exchangeable scores is the highest.
    known = predict([0.0, 2.0])
    assert known is not None and known.chance() == pytest.approx(1 / 3)
    assert (known.mean, known.std, known.dof) == (pytest.approx(1), pytest.approx(math.sqrt(3)), 1)
    # A single score: higher or lower alike, and after two alike 0.5 / 2.5 is unseen.
    single = predict([4.0, 4.0])
    assert single is not None and single.chance(0.7) == pytest.approx(0.1)
    assert predict([None]) is None


def test_prediction_with_a_population() -> None:
    # σ² = (4·1 + 0) / 4, v = 1 / (1/1 + 1/1) = 1/2, mean 1/2 (0/1 + 1/1), std √(1 + 1/2), 4 + 1 - 1 dof.
    known = predict([1.0], population=ScorePopulation(0.0, 1.0, 1.0, 4))
    assert known is not None
    assert (known.mean, known.std, known.dof) == (pytest.approx(0.5), pytest.approx(math.sqrt(1.5)), 4)
    # Prompts that do not differ: the mean is theirs. Prompts of which nothing is known: it is the prompt's.
    same, unknown = (predict([1.0], population=ScorePopulation(0.0, 1.0, b, 4)) for b in (0.0, math.inf))
    assert same is not None and (same.mean, same.std) == (0.0, pytest.approx(1))
    assert unknown is not None and (unknown.mean, unknown.std) == (1.0, pytest.approx(math.sqrt(2)))
    # With more spread within prompts, more of the little that is above.
    wide = predict([1.0], population=ScorePopulation(0.0, 9.0, 0.0, 4))
    assert wide is not None and wide.chance() > same.chance()


def test_chance_does_not_depend_on_the_unit_and_falls_with_the_tolerance() -> None:
    scores = [0.3, -1.2, 0.9, 0.9, 2.0]
    known, scaled = predict(scores), predict([7 + 10 * x for x in scores])
    assert known is not None and scaled is not None
    assert scaled.chance(5.0) == pytest.approx(known.chance(0.5))
    assert known.chance(1.0) < known.chance(0.5) < known.chance()


@pytest.mark.parametrize(
    "fields", [(math.nan, 1.0, 1.0, 1), (0.0, 0.0, 1.0, 1), (0.0, 1.0, -1.0, 1), (0.0, 1.0, 1.0, 0)]
)
def test_an_impossible_population_is_refused(fields: tuple[float, float, float, int]) -> None:
    with raises_error("invalid_value", key="population"):
        ScorePopulation(*fields)


RULE = ConfidenceBasedStopping(min_samples=4, max_samples=18, batch=4, probability=0.1)


def test_rounds() -> None:
    assert RULE.next_samples([]) == 4
    assert RULE.next_samples([1.0, 2.0, 3.0]) == 1
    assert RULE.next_samples([1.0, 2.0, 3.0, 4.0]) == 4
    assert RULE.next_samples([float(x) for x in range(16)]) == 2
    assert RULE.next_samples([float(x) for x in range(18)]) == 0
    assert RULE.next_samples([None] * 8) == 4


def test_chance_of_being_beaten() -> None:
    # Two distinct scores, each once: 1/3 a sample (see above), 16 samples to come.
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


@pytest.mark.parametrize("name", by_default(DISTRIBUTIONS, "normal", "rarely better"))
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
    ("settings", "key"),
    [
        ({"min_samples": 0}, "min_samples"),
        ({"min_samples": 20}, "min_samples"),
        ({"batch": 0}, "batch"),
        ({"probability": 1.5}, "probability"),
        ({"probability": math.nan}, "probability"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"highest": math.nan}, "tolerance"),
    ],
)
def test_wrong_settings_of_stopping(settings: dict[str, float], key: str) -> None:
    with raises_error("invalid_value", key=key):
        ConfidenceBasedStopping(**settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
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


PATTERN = (-1.0, -0.5, 0.0, 0.2, 0.6, 1.0)
WIDE, NARROW, SAME = [10 * x for x in PATTERN], [0.1 * x for x in PATTERN], [0.0] * 6


def _gains(known: Predictive, count: int) -> list[float]:
    gains = MarginalGains(known)
    return [gains.at(k) for k in range(1, count + 1)]


def test_gains_of_the_normal() -> None:
    # At z = 0 and u = 1: φ(0) = 0.3989423, and then ∫_0^∞ Φ(1 - Φ) = 1 / (2 √π) = 0.2820948.
    first, second, third = _gains(Predictive(5.0, 1.0, 5.0, 2.0, 9), 3)
    assert (first / 2, second / 2) == (pytest.approx(0.3989423), pytest.approx(0.2820948))
    assert third < second
    # u std (φ(1) - Q(1)) = 0.5 · 2 · (0.2419707 - 0.1586553); z below 0: φ(1) + 1 · Q(-1) = 1.0833155.
    assert _gains(Predictive(3.0, 0.5, 1.0, 2.0, 9), 1) == [pytest.approx(0.0833155, abs=1e-6)]
    assert _gains(Predictive(-1.0, 1.0, 0.0, 1.0, 9), 1) == [pytest.approx(1.0833155, abs=1e-6)]
    assert _gains(Predictive(3.0, 0.0, 1.0, 2.0, 9), 2) == [0.0, 0.0]


def test_gains_are_those_of_a_simulation() -> None:
    rng, known = random.Random(0), Predictive(0.5, 0.6, 0.0, 1.0, 9)
    gains = [0.0, 0.0, 0.0]
    for _ in range(20_000):
        best = known.best
        for k in range(3):
            score = rng.gauss(0, 1) if rng.random() < known.unseen else -9.0
            gains[k] += max(0.0, score - best) / 20_000
            best = max(best, score)
    assert _gains(known, 3) == pytest.approx(gains, abs=0.01)


def test_the_first_samples_come_first() -> None:
    allocator = AdaptiveComputeAllocator(min_samples=3)
    assert allocator.next_samples([[], [1.0, 2.0], [0.0] * 5], 10) == [3, 1, 0]
    with raises_error("budget_too_small"):
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
    ("settings", "key"),
    [
        ({"min_samples": 0}, "min_samples"),
        ({"max_samples": 3}, "min_samples"),
        ({"batch": 0}, "batch"),
        ({"minimum_gain": -0.1}, "minimum_gain"),
    ],
)
def test_wrong_settings_of_adaptive(settings: dict[str, float], key: str) -> None:
    with raises_error("invalid_value", key=key):
        AdaptiveComputeAllocator(**settings)  # pyright: ignore[reportArgumentType]
