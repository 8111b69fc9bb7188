"""Length- and style-controlled win rates: logistic models, refitted in every resample."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rlhf_eval.stats.differences import Clusters
from rlhf_eval.stats.interval import Interval, check_level, percentile, resampled_counts, unit_codes

REFITS = 1000
_LARGE = 20_000
"""Rows above which a tenth of the refits is made; their spread is then small compared with the estimate."""

ALPACA_SLOPE = -1.61
"""Coefficient of tanh of the standardised length difference, baseline minus model: the mean of those that
AlpacaEval 2 publishes for its baseline made verbose (−1.58) and made concise (−1.64), which measure the
judge's preference for length at equal quality."""


@dataclass(frozen=True)
class ControlledWinRate:
    """A win rate at equal length and style.

    Attributes:
        win_rate: P(the model wins) where all features are zero.
        effects: Coefficient of each feature in log-odds; positive where the judge prefers more of it.
    """

    win_rate: Interval
    effects: list[Interval]


def length_feature(lengths: ArrayLike, others: ArrayLike) -> np.ndarray:
    """(n,) tanh of the difference of length in its standard deviations, 0 at equal length.

    As in AlpacaEval 2: Dubois et al. 2024, "Length-controlled AlpacaEval", eq. 2,
    https://arxiv.org/abs/2404.04475.

    Args:
        lengths: (n,) lengths of the model's answers, such as in characters.
        others: (n,) of the answers they are compared with.
    """
    difference = np.asarray(lengths, dtype=float) - np.asarray(others, dtype=float)
    spread = difference.std(ddof=1) if len(difference) > 1 else 0.0
    return np.tanh(difference / spread) if spread > 0 else np.zeros_like(difference)


def style_counts(answer: str) -> tuple[int, int, int]:
    """Markdown headings, list items and bold passages of an answer, the features of style control."""
    headings = len(re.findall(r"^#{1,6}\s", answer, re.M))
    items = len(re.findall(r"^\s*(?:[-*+]|\d+[.)])\s", answer, re.M))
    return headings, items, len(re.findall(r"\*\*[^*\n]+\*\*|__[^_\n]+__", answer))


def style_features(answers: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """(n, 3) of (a − b)/(a + b + 1) for the `style_counts` a, b of both answers.

    Li et al. 2024, "Does style matter?" (Chatbot Arena's style control), divide by a + b.
    """
    a = np.array([style_counts(answer) for answer in answers], dtype=float).reshape(-1, 3)
    b = np.array([style_counts(answer) for answer in others], dtype=float).reshape(-1, 3)
    return (a - b) / (a + b + 1)


def controlled_win_rate(
    verdicts: ArrayLike,
    features: ArrayLike,
    prompts: Clusters = None,
    *,
    level: float = 0.95,
    refits: int = REFITS,
    seed: int = 0,
) -> ControlledWinRate:
    """The win rate if the answers did not differ in the features: σ(b₀) of P(win) = σ(b₀ + b·x).

    The model is refitted in every resample of prompts; AlpacaEval 2's own standard error, the spread of
    the fitted probabilities, treats the fit as known; its 95% interval covers 54%.

    Args:
        verdicts: (n,) in [0, 1]: 1 the model wins, ½ a tie; or the judge's probability.
        features: (n,) or (n, k) differences between the two answers, 0 if there is none, such as
            `length_feature` and `style_features`.
        prompts: (n,) the prompt of each row. None: each row is its own.
        level: Nominal coverage.
        refits: Number of resamples; a tenth for more than 20,000 rows.
        seed: Seed of the resamples.

    Raises:
        ValueError: the shapes differ or a verdict is outside [0, 1].
    """
    check_level(level)
    y, x = _verdicts(verdicts), np.asarray(features, dtype=float)
    x = x.reshape(len(y), -1) if x.size == len(y) else x
    if x.ndim != 2 or len(x) != len(y):
        raise ValueError(f"got features of shape {x.shape} for {len(y)} verdicts; one row each is expected")
    design = np.column_stack([np.ones(len(y)), x])
    codes = unit_codes(prompts, len(y))
    found, resampled, n = _refits(design, y, np.ones(len(y)), codes, refits, seed)
    method = "logistic model, refit bootstrap"

    def interval(estimate: np.ndarray, of: np.ndarray) -> Interval:
        return Interval(float(estimate), *percentile(of, level), level, method, "prompt", n, float(of.std()))

    win = interval(_sigmoid(found[0]), _sigmoid(resampled[:, 0]))
    effects = zip(found[1:], resampled.T[1:], strict=True)
    return ControlledWinRate(win, [interval(estimate, of) for estimate, of in effects])


def alpaca_eval_win_rate(
    verdicts: ArrayLike,
    lengths: ArrayLike,
    baseline_lengths: ArrayLike,
    *,
    difficulty: ArrayLike | None = None,
    baseline_weight: float = 0.2,
    level: float = 0.95,
    refits: int = REFITS,
    seed: int = 0,
) -> Interval:
    """AlpacaEval 2's length-controlled win rate: the mean of σ(b₀ + b₂ · difficulty).

    The fit is of P(win) = σ(b₀ + b₁ · tanh((baseline length − length)/sd) + b₂ · difficulty).
    `length_controlled_v1` of Dubois et al. 2024, https://arxiv.org/abs/2404.04475, also fits the baseline
    made verbose and made concise, with a total weight of 0.2 and without b₀, so that b₁ stays near the
    judge's preference at equal quality. A file of annotations has no verdicts on those; here each row is
    joined by one of weight `baseline_weight` with its length and no b₀, whose verdict is σ(ALPACA_SLOPE ·
    tanh(·)). The published fit also has an L1 penalty, its strength chosen by five-fold cross-validation;
    this one has none.

    Args:
        verdicts: (n,) in [0, 1]: the probability that the model's answer is better than the baseline's.
        lengths: (n,) characters of the model's answers.
        baseline_lengths: (n,) of the baseline's.
        difficulty: (n,) of the instructions, from the benchmark's fit over all its models; None leaves the
            term out.
        baseline_weight: Weight of the rows that hold b₁ to it; 0 leaves them out.
        level: Nominal coverage.
        refits: Number of resamples of prompts, in each of which the model is refitted.
        seed: Seed of the resamples.

    Raises:
        ValueError: the lengths differ or a verdict is outside [0, 1].
    """
    check_level(level)
    y, short = _verdicts(verdicts), length_feature(baseline_lengths, lengths)
    hard = np.zeros((len(y), 0)) if difficulty is None else np.asarray(difficulty, dtype=float)[:, None]
    if len(short) != len(y) or len(hard) != len(y):
        raise ValueError(f"got {len(y)} verdicts for {len(short)} answers; one each is expected")
    design = np.column_stack([np.ones(len(y)), short, hard])
    gamed = np.column_stack([np.zeros(len(y)), short, np.zeros_like(hard)])
    weight = np.repeat([1.0, baseline_weight], len(y))
    targets = np.concatenate([y, _sigmoid(ALPACA_SLOPE * short)])
    prompts = np.tile(np.arange(len(y)), 2)
    rows = np.concatenate([design, gamed])
    found, resampled, n = _refits(rows, targets, weight, prompts, refits, seed)
    rates = np.array([_sigmoid(b[0] + hard @ b[2:]).mean() for b in [found, *resampled]])
    method = "AlpacaEval 2's logistic model, refit bootstrap"
    return Interval(
        float(rates[0]), *percentile(rates[1:], level), level, method, "prompt", n, float(rates[1:].std())
    )


def _refits(
    design: np.ndarray, verdicts: np.ndarray, weight: np.ndarray, prompts: np.ndarray, refits: int, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """(k,) coefficients of all rows, (refits, k) of resamples of prompts, and the number of prompts."""
    n = int(prompts.max()) + 1 if len(prompts) else 0
    if not n:
        nothing = np.full(design.shape[1], math.nan)
        return nothing, nothing[None], 0
    refits = max(refits // 10, 1) if len(prompts) > _LARGE else refits
    found = _fit(design, verdicts, weight[None], np.zeros(design.shape[1]))[0]
    blocks = resampled_counts(n, refits, np.random.default_rng(seed))
    drawn = [_fit(design, verdicts, weight * counts[:, prompts], found) for counts in blocks]
    return found, np.concatenate(drawn), n


def _fit(x: np.ndarray, y: np.ndarray, weights: np.ndarray, start: np.ndarray) -> np.ndarray:
    """(resamples, k) coefficients of greatest likelihood for (resamples, n) weights, by Newton's method."""
    k = x.shape[1]
    b = np.tile(start, (len(weights), 1))
    products = (x[:, :, None] * x[:, None, :]).reshape(len(x), k * k)
    for _ in range(30):
        p = _sigmoid(b @ x.T)
        # A negligible penalty, which keeps the solution finite where one side never wins.
        hessian = ((weights * p * (1 - p)) @ products).reshape(-1, k, k) + 1e-3 * np.eye(k)
        gradient = (weights * (y - p)) @ x - 1e-3 * b
        step = np.clip(np.linalg.solve(hessian, gradient[..., None])[..., 0], -2, 2)
        b += step
        if np.abs(step).max() < 1e-6:
            break
    return b


def _verdicts(verdicts: ArrayLike) -> np.ndarray:
    y = np.asarray(verdicts, dtype=float)
    if y.ndim != 1 or not ((y >= 0) & (y <= 1)).all():
        raise ValueError("verdicts must be a flat sequence of numbers in [0, 1]")
    return y


def _sigmoid(x: ArrayLike) -> np.ndarray:
    return 0.5 * (1 + np.tanh(np.asarray(x) / 2))
