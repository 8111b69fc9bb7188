"""Win rates of pairwise verdicts, the judge's position bias and consistency, and strengths of many models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rlhf_eval.stats.differences import Clusters, proportion_interval, verdict_difference
from rlhf_eval.stats.interval import (
    RESAMPLES,
    Interval,
    check_level,
    grouped,
    percentile,
    resampled_counts,
    unit_codes,
)


def win_rate(
    verdicts: ArrayLike,
    swapped: ArrayLike | None = None,
    prompts: Clusters = None,
    *,
    level: float = 0.95,
) -> Interval:
    """Share of prompts where the model wins, (wins + ½ ties) / n, with the interval of `proportion_interval`.

    The unit is the prompt. The two games of a prompt, one in each order of the answers, are one unit: they
    are not independent, and counted as two they would make intervals too narrow.

    Args:
        verdicts: (n,) 1 the model wins, 0 the other, ½ a tie; or the judge's probability that the model wins.
        swapped: (n,) the same with the answers in the other order; a prompt counts with the mean of both.
        prompts: (n,) the prompt of each row, where a prompt has several.
        level: Nominal coverage.

    Raises:
        ValueError: the lengths differ or a verdict is outside [0, 1].
    """
    found = np.asarray(verdicts, dtype=float)
    if swapped is not None:
        found = (found + _same_length(found, swapped)) / 2
    return proportion_interval(found, prompts, level=level, unit="prompt")


class JudgeOrder(NamedTuple):
    """Effect of the answers' order on a judge.

    Attributes:
        first_wins: Share of verdicts for the answer shown first; ½ without bias.
        bias: first_wins − ½.
        consistency: Share of prompts whose verdict is the same in both orders.
    """

    first_wins: Interval
    bias: Interval
    consistency: Interval


def position_bias(shown_first: ArrayLike, shown_second: ArrayLike, *, level: float = 0.95) -> JudgeOrder:
    """How much a judge favours the answer that it reads first, and how often order decides.

    Args:
        shown_first: (n,) the model's verdicts, in [0, 1], where its answer was shown first.
        shown_second: (n,) the same prompts with its answer shown second.
        level: Nominal coverage.

    Raises:
        ValueError: the lengths differ or a verdict is outside [0, 1].
    """
    a = np.asarray(shown_first, dtype=float)
    b = _same_length(a, shown_second)
    return JudgeOrder(
        proportion_interval((a + 1 - b) / 2, level=level, unit="prompt"),
        verdict_difference((a - b) / 2, level=level, unit="prompt"),
        proportion_interval(np.sign(a - 0.5) == np.sign(b - 0.5), level=level, unit="prompt"),
    )


def bradley_terry(
    games: Sequence[tuple[int, int, float]],
    models: int,
    prompts: Clusters = None,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Interval]:
    """Strengths of models from games between pairs of them: P(i beats j) = σ(θ_i − θ_j), Σθ = 0.

    Bradley & Terry 1952, "Rank analysis of incomplete block designs", https://doi.org/10.2307/2334029; the
    likelihood's maximum by Newton's method, with a penalty of θ²/100, which keeps a model that never lost
    finite.

    Args:
        games: (first, second, verdict) with the models' numbers and the first's verdict in [0, 1], ½ a tie.
        models: Number of models.
        prompts: The prompt of each game, which is resampled with all its games. None: each game is its own.
        level: Nominal coverage.
        resamples: Number of resamples.
        seed: Seed of the resamples.

    Returns:
        The strength of each model, in log-odds against the mean of all.

    Raises:
        ValueError: a verdict is outside [0, 1], a model has no number, or the prompts do not match.
    """
    check_level(level)
    first, second = (np.array([game[side] for game in games], dtype=np.intp) for side in (0, 1))
    verdicts = np.array([game[2] for game in games], dtype=float)
    if not ((verdicts >= 0) & (verdicts <= 1)).all() or {*first, *second} - set(range(models)):
        raise ValueError(f"a game is two of the models 0 to {models - 1} and a verdict in [0, 1]")
    rng = np.random.default_rng(seed)
    codes = unit_codes(prompts, len(games))
    n = int(codes.max()) + 1 if len(games) else 0
    codes = grouped(codes, rng)
    wins = np.zeros((codes.max(initial=-1) + 1, models * models))
    np.add.at(wins, (codes, first * models + second), verdicts)
    np.add.at(wins, (codes, second * models + first), 1 - verdicts)
    estimate = _strengths(wins.sum(0).reshape(1, models, models))[0]
    drawn = [
        _strengths((counts @ wins).reshape(-1, models, models))
        for counts in resampled_counts(len(wins), resamples, rng)
    ]
    strengths = np.concatenate(drawn)
    unit = "game" if prompts is None else "prompt"
    return [
        Interval(float(value), *percentile(of, level), level, "refit bootstrap", unit, n, float(of.std()))
        for value, of in zip(estimate, strengths.T, strict=True)
    ]


def _strengths(wins: np.ndarray, penalty: float = 0.01) -> np.ndarray:
    """(resamples, models) penalised maximum-likelihood strengths of (resamples, models, models) wins."""
    played = wins + wins.transpose(0, 2, 1)
    models = wins.shape[-1]
    strengths = np.zeros(wins.shape[:2])
    for _ in range(50):
        chance = 1 / (1 + np.exp(strengths[:, None, :] - strengths[:, :, None]))
        gradient = (wins - played * chance).sum(-1) - penalty * strengths
        weight = played * chance * (1 - chance)
        hessian = -weight
        diagonal = np.arange(models)
        hessian[:, diagonal, diagonal] += weight.sum(-1) + penalty
        step = np.clip(np.linalg.solve(hessian, gradient[..., None])[..., 0], -2, 2)
        strengths += step
        if np.abs(step).max(initial=0) < 1e-10:
            break
    return strengths - strengths.mean(-1, keepdims=True)


def _same_length(first: np.ndarray, second: ArrayLike) -> np.ndarray:
    other = np.asarray(second, dtype=float)
    if other.shape != first.shape:
        raise ValueError(f"got {first.size} and {other.size} values; each prompt has one of both")
    return other
