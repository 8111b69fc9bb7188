"""What drawn scores say about the next: Student's tail, unseen shares, populations, predictions."""

from __future__ import annotations

import math
import random

import pytest

from rlhf_data import UserError
from rlhf_infer.sampling.score_model import ScorePopulation, predict, student_tail, unseen_share


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
    with pytest.raises(UserError, match="population has mean"):
        ScorePopulation(*fields)
