"""Nominal against seen: how often each interval of `rlhf_eval.stats` contains the truth, by simulation.

Usage: python scripts/coverage_table.py [--simulations N] [--write]. Prints the table, or writes it into
docs/statistics.md; `tests/eval/stats/test_coverage.py` runs the same cases.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlhf_eval import stats
from rlhf_eval.stats import Interval
from rlhf_eval.stats.controlled import ALPACA_SLOPE

PAGE = Path(__file__).parents[1] / "docs" / "statistics.md"
LEVEL = 0.95
RESAMPLES = 400
"""Of each simulated data set; fewer than by default, which costs coverage a few tenths of a percent."""


class Case(NamedTuple):
    """One interval on data of one kind."""

    what: str
    truth: float
    draw: Callable[[np.random.Generator], Interval]


def _seed(rng: np.random.Generator) -> int:
    """Other resamples in every simulation, which would share what is odd about one set of them."""
    return int(rng.integers(2**31))


def _paired(rng: np.random.Generator) -> Interval:
    hard = rng.normal(0, 1, 50)  # the same prompts for both
    return stats.paired_difference(
        hard + rng.exponential(1, 50), hard + rng.exponential(0.7, 50), resamples=RESAMPLES, seed=_seed(rng)
    )


def _few(rng: np.random.Generator) -> Interval:
    return stats.paired_difference(rng.normal(0.3, 1, 3), rng.normal(0, 1, 3))


def _clustered(rng: np.random.Generator) -> Interval:
    sizes = rng.integers(1, 6, 60)
    prompts = np.repeat(np.arange(60), sizes)
    scores = rng.normal(0, 1, 60)[prompts] + rng.normal(0.2, 0.5, len(prompts))
    return stats.mean_interval(scores, prompts, resamples=RESAMPLES, seed=_seed(rng))


def _verdicts(prompts: int, gains: float, losses: float) -> Callable[[np.random.Generator], Interval]:
    def draw(rng: np.random.Generator) -> Interval:
        u = rng.random(prompts)
        return stats.paired_difference((u < gains) * 1.0, (u > 1 - losses) * 1.0)

    return draw


def _two_samples(rng: np.random.Generator) -> Interval:
    return stats.two_sample_difference(
        rng.exponential(1, 60), rng.normal(0.5, 2, 80), resamples=RESAMPLES, seed=_seed(rng)
    )


def _both_orders(rng: np.random.Generator) -> Interval:
    favour = rng.beta(3, 2, 120)  # of the prompt; mean .6, and both games of a prompt share it
    first, second = (rng.random((2, 120)) < favour) * 1.0
    return stats.win_rate(first, second)


def _subsets(rng: np.random.Generator) -> Interval:
    parts = [(rng.random(rows) < rate) * 1.0 for rows, rate in ((150, 0.9), (80, 0.6), (40, 0.97))]
    return stats.mean_of_parts([stats.proportion_interval(part) for part in parts])


def _soft(rng: np.random.Generator) -> Interval:
    return stats.win_rate(rng.beta(0.1, 2, 300))


def _position(rng: np.random.Generator) -> Interval:
    quality = rng.normal(0.3, 1, 200)
    chance = 1 / (1 + np.exp(-np.stack([quality + 0.8, quality - 0.8])))
    first, second = (rng.random((2, 200)) < chance) * 1.0
    return stats.position_bias(first, second).bias


def _position_truth() -> float:
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    chance = [1 / (1 + np.exp(-(0.3 + nodes + shift))) for shift in (0.8, -0.8)]
    return float(weights @ (chance[0] - chance[1]) / weights.sum() / 2)


def _length_games(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    longer = np.tanh(rng.normal(0.7, 1, 400))
    return (rng.random(400) < 1 / (1 + np.exp(0.5 - 1.5 * longer))) * 1.0, longer


def _controlled(rng: np.random.Generator) -> Interval:
    return stats.controlled_win_rate(*_length_games(rng), refits=RESAMPLES, seed=_seed(rng)).win_rate


def _length_effect(rng: np.random.Generator) -> Interval:
    return stats.controlled_win_rate(*_length_games(rng), refits=RESAMPLES, seed=_seed(rng)).effects[0]


def _alpaca(rng: np.random.Generator) -> Interval:
    shorter = rng.normal(0.8, 1, 400)  # the baseline's length less the model's, in standard deviations
    slope = np.tanh(shorter / shorter.std(ddof=1)) * ALPACA_SLOPE
    verdicts = (rng.random(400) < 1 / (1 + np.exp(0.5 - slope))) * 1.0
    return stats.alpaca_eval_win_rate(verdicts, -shorter, np.zeros(400), refits=RESAMPLES, seed=_seed(rng))


def _strength(rng: np.random.Generator) -> Interval:
    strengths = np.array([0.5, 0.0, -0.5])
    pairs = [(i, j) for _ in range(80) for i, j in ((0, 1), (0, 2), (1, 2))]
    games = [(i, j, float(rng.random() < 1 / (1 + np.exp(strengths[j] - strengths[i])))) for i, j in pairs]
    prompts = [game // 3 for game in range(len(games))]
    return stats.bradley_terry(games, 3, prompts, resamples=RESAMPLES, seed=_seed(rng))[0]


def _corrected(rng: np.random.Generator) -> Interval:
    labels = rng.random(150) < 0.5

    def judge(truth: np.ndarray) -> np.ndarray:
        return np.where(truth, rng.random(len(truth)) < 0.85, rng.random(len(truth)) < 0.2)

    return stats.corrected_rate(judge(rng.random(500) < 0.6), judge(labels), labels)


def _powered(rng: np.random.Generator) -> Interval:
    labels = rng.normal(0.5, 1, 1100)
    judge = 0.8 * labels + 0.3 + rng.normal(0, 0.5, 1100)  # biased: its mean alone is .7
    return stats.prediction_powered(
        judge[100:], judge[:100], labels[:100], resamples=RESAMPLES, seed=_seed(rng)
    )


def _kappa(rng: np.random.Generator) -> Interval:
    first = rng.random(200) < 0.4
    second = np.where(rng.random(200) < 0.7, first, rng.random(200) < 0.4)
    return stats.cohen_kappa(first.tolist(), second.tolist(), resamples=RESAMPLES, seed=_seed(rng))


def _iqm(rng: np.random.Generator) -> Interval:
    return stats.iqm_interval(
        np.linspace(-1, 1, 20) + rng.normal(0.3, 0.5, (10, 20)), resamples=RESAMPLES, seed=_seed(rng)
    )


def _iqm_prompts(rng: np.random.Generator) -> Interval:
    scores = rng.normal(0, 0.5, (1, 60)) + rng.normal(0, 0.2, (5, 1)) + rng.normal(0.3, 0.5, (5, 60))
    return stats.iqm_interval(scores, resample_prompts=True, resamples=RESAMPLES, seed=_seed(rng))


def _improvement(rng: np.random.Generator) -> Interval:
    scores = rng.normal(0, 1, (2, 10, 8))
    return stats.probability_of_improvement(scores[0] + 0.5, scores[1], resamples=RESAMPLES, seed=_seed(rng))


def _bernoulli(rate: float, prompts: int) -> Callable[[np.random.Generator], Interval]:
    return lambda rng: stats.win_rate((rng.random(prompts) < rate) * 1.0)


_IMPROVED = 0.5 * (1 + math.erf(0.5 / 2))
"""P(X + ½ > Y) of two standard normals: Φ(½/√2)."""

CASES = (
    Case("mean, 60 prompts of 1 to 5 rows", 0.2, _clustered),
    Case("paired difference, skewed scores of 50 prompts", 0.3, _paired),
    Case("paired difference, 3 prompts", 0.3, _few),
    Case("paired difference, verdicts: 25% gains, 25% losses of 4", 0.0, _verdicts(4, 0.25, 0.25)),
    Case("paired difference, verdicts: 2% gains, 2% losses of 100", 0.0, _verdicts(100, 0.02, 0.02)),
    Case("paired difference, verdicts: 10% gains, 5% losses of 200", 0.05, _verdicts(200, 0.1, 0.05)),
    Case("two-sample difference, 60 and 80 rows", 0.5, _two_samples),
    Case("win rate .6, 120 prompts", 0.6, _bernoulli(0.6, 120)),
    Case("win rate .02, 100 prompts", 0.02, _bernoulli(0.02, 100)),
    Case("win rate, 120 prompts in both orders", 0.6, _both_orders),
    Case("mean of rates .9, .6 and .97 of three subsets", (0.9 + 0.6 + 0.97) / 3, _subsets),
    Case("win rate of probabilities, mean .048, 300 prompts", 0.1 / 2.1, _soft),
    Case("position bias, 200 prompts in both orders", _position_truth(), _position),
    Case("length-controlled win rate, 400 prompts", 1 / (1 + math.exp(0.5)), _controlled),
    Case("effect of length on the verdict", 1.5, _length_effect),
    Case("AlpacaEval 2's model, 400 prompts", 1 / (1 + math.exp(0.5)), _alpaca),
    Case("Bradley-Terry strength, 3 models, 80 prompts", 0.5, _strength),
    Case("rate corrected by 150 labels", 0.6, _corrected),
    Case("prediction-powered mean, 100 labels", 0.5, _powered),
    Case("Cohen's kappa, 200 rows", 0.7, _kappa),
    Case("interquartile mean, 10 runs of 20 tasks", 0.3, _iqm),
    Case("interquartile mean, 5 seeds by 60 prompts", 0.3, _iqm_prompts),
    Case("probability of improvement, 10 runs of 8 tasks", _IMPROVED, _improvement),
)


def seen(case: Case, simulations: int, seed: int = 0) -> tuple[float, Interval]:
    """Share of the simulations whose interval contains the truth, and one of the intervals."""
    rng = np.random.default_rng(seed)
    drawn = [case.draw(rng) for _ in range(simulations)]
    return float(np.mean([found.low <= case.truth <= found.high for found in drawn])), drawn[0]


def table(simulations: int) -> str:
    """The table of all cases."""
    lines = ["| interval | resampled | method | nominal | seen |", "|---|---|---|---|---|"]
    for case in CASES:
        share, found = seen(case, simulations)
        lines.append(f"| {case.what} | {found.unit} | {found.method} | {LEVEL:.3f} | {share:.3f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = table(options.simulations)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        text = re.sub(r"\| interval \|.*?\n(?!\|)", lambda _: found + "\n", text, flags=re.S)
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
