"""Posterior predictive distribution of a prompt's next scores, given those seen so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_data import invalid_value

_SAME_SCORE = 1e-4
"""Two scores closer than this (relative to scores above 1) are equal: batching changes their last bits."""
_SAME_LOGP = 1e-3
"""Two log-probs of completions, in nats, that are closer than this are equal."""
_MOST_PRIOR = 100
"""Samples that a variance common to all prompts counts for."""
_EULER = 0.5772156649015329


@dataclass(frozen=True)
class ScorePopulation:
    """How scores vary within prompts and between them.

    Score x of prompt i: x ~ N(μ_i, σ_i²), μ_i ~ N(mean, between), and σ_i² is known as if `prior_samples`
    scores of variance `within` had been seen.

    Args:
        mean: mean over the prompts.
        within: typical variance of a prompt's scores, > 0.
        between: variance of the prompts' means, >= 0, infinite where it is not known.
        prior_samples: at least 1; few where the prompts' variances differ much.

    Raises:
        UserError: a value outside its range.
    """

    mean: float
    within: float
    between: float
    prior_samples: int

    def __post_init__(self) -> None:
        valid = math.isfinite(self.mean) and 0 < self.within < math.inf and self.between >= 0
        if not valid or self.prior_samples < 1:
            raise invalid_value(
                f"the scores' population has mean {self.mean}, variance {self.within} within prompts, "
                f"{self.between} between them and {self.prior_samples} prior samples; expected a finite "
                "mean, a variance above 0 within and at least 0 between, and at least 1 sample",
                "population",
            )

    @classmethod
    def fit(cls, groups: Sequence[Sequence[float | None]]) -> ScorePopulation | None:
        """Estimate it from the distinct scores of several prompts.

        - Means, by analysis of variance: between = max(0, (B - W) / d₀), W = Σ_i Σ_x (x - x̄_i)² / Σ_i ν_i,
          B = Σ_i d_i (x̄_i - x̄)² / (P - 1), d₀ = (D - Σ_i d_i² / D) / (P - 1), with d_i distinct scores of
          prompt i, ν_i = d_i - 1 and D of all (Searle et al. 1992, Variance Components, section 3.6).
        - Variances s_i², from their logarithms (Smyth 2004, https://doi.org/10.2202/1544-6115.1027, section
          6.2): e_i = log s_i² - ψ(ν_i/2) + log(ν_i/2), ψ'(ν/2) = var(e) - mean(ψ'(ν_i/2)) gives ν, the
          `prior_samples`, and log `within` = ē + ψ(ν/2) - log(ν/2). Variances that differ no more than by
          chance are one, W, which counts as 100 samples.

        Args:
            groups: scores of P prompts; None if nothing was applicable, which is left out.

        Returns:
            None if no prompt has two scores that differ: nothing is known about the spread.
        """
        distinct = [values for values in map(_distinct, groups) if values]
        spread = [(_squares(values), len(values) - 1) for values in distinct if len(values) > 1]
        if not spread:
            return None
        pooled = math.fsum(squares for squares, _ in spread) / sum(dof for _, dof in spread)
        mean = math.fsum(map(math.fsum, distinct)) / sum(map(len, distinct))
        return cls(mean, between=_between(distinct, mean, pooled), **_variances(spread, pooled))


@dataclass(frozen=True)
class Predictive:
    """The distribution of the next score of a prompt.

    With probability 1 - `unseen` it is one already seen, which is no better than the best. Otherwise it
    is drawn from `mean` + `std` · t, t of Student's distribution with `dof` degrees of freedom.

    Args:
        best: the highest score so far.
        unseen: probability of a score that was not seen yet.
        mean: location of new scores.
        std: scale of new scores, > 0, or infinite if nothing is known about it.
        dof: degrees of freedom, >= 1.
    """

    best: float
    unseen: float
    mean: float
    std: float
    dof: int

    def chance(self, tolerance: float = 0.0) -> float:
        """Probability that the next score is higher than the best by more than `tolerance`."""
        z = 0.0 if math.isinf(self.std) else (self.best + tolerance - self.mean) / self.std
        return self.unseen * student_tail(z, self.dof)


def predict(
    scores: Sequence[float | None],
    confidences: Sequence[float] = (),
    *,
    population: ScorePopulation | None = None,
) -> Predictive | None:
    """The distribution of a prompt's next score.

    The sample is the d distinct scores, with mean x̄ and sum of squares S = Σ (x - x̄)². Under the reference
    prior 1/σ² the next score is x̄ + s √(1 + 1/d) · t with s² = S / (d - 1) and d - 1 degrees of freedom
    (Gelman et al. 2013, Bayesian Data Analysis, section 3.2). With a population (m, w, b, ν),
    σ² = (ν w + S) / (ν + d - 1) replaces s², and the mean is shrunk towards m: v = 1 / (1/b + d/σ²),
    mean v (m/b + d x̄/σ²), std √(σ² + v), ν + d - 1 degrees of freedom.

    A single distinct score without a population says nothing about the spread: a new one is higher with
    probability 1/2.

    Args:
        scores: scores of the samples; a sample with None is left out.
        confidences: log-probs of the whole completions, one for each score; empty if they are not known.
        population: what is known from other prompts.

    Returns:
        None if there is no score.
    """
    values = _distinct(scores)
    if not values:
        return None
    unseen, best, count = unseen_share(scores, confidences), max(values), len(values)
    mean = math.fsum(values) / count
    if population is None:
        if count == 1:
            return Predictive(best, unseen, mean, math.inf, 1)
        std = math.sqrt(_squares(values) / (count - 1) * (1 + 1 / count))
        return Predictive(best, unseen, mean, std, count - 1)
    dof = population.prior_samples + count - 1
    variance = (population.prior_samples * population.within + _squares(values)) / dof
    between = population.between
    if between == 0:
        mean, shift = population.mean, 0.0
    else:
        shift = 1 / (1 / between + count / variance)
        mean = shift * (population.mean / between + count * mean / variance)
    return Predictive(best, unseen, mean, math.sqrt(variance + shift), dof)


def unseen_share(scores: Sequence[float | None], confidences: Sequence[float] = ()) -> float:
    """Probability that the next sample has a score that was not there yet, the smaller of two estimates.

    - Of n scores f occur once: (f + 1/2) / (n + 1/2), Good's estimate f / n of what is unseen (Good 1953,
      https://doi.org/10.1093/biomet/40.3-4.237) with half a count more, so that it never is 0. It is 1 where
      all differ, and falls as 1 / (2 n + 1) once all repeat.
    - 1 - Σ π(y) over the distinct completions y that were drawn, π(y) the exponential of the confidence: what
      the policy itself leaves for others. It falls fast where the policy is sure, and stays 1 for long texts.
    """
    known = [score for score in scores if score is not None]
    counts = [sum(1 for x in known if _same_score(x, value)) for value in _distinct(scores)]
    good = (counts.count(1) + 0.5) / (len(known) + 0.5)
    if not confidences:
        return good
    kept: list[tuple[float, float]] = []
    for score, logp in zip(scores, confidences, strict=True):
        value = math.inf if score is None else score
        if not any(abs(logp - q) <= _SAME_LOGP and _same_score(value, x) for x, q in kept):
            kept.append((value, logp))
    return max(0.0, min(good, 1 - math.fsum(math.exp(logp) for _, logp in kept)))


def student_tail(t: float, dof: int) -> float:
    """P(T > t) of Student's distribution with a whole number of degrees of freedom.

    With θ = atan(t / √dof): Abramowitz and Stegun 1964, 26.7.3 (odd) and 26.7.4 (even).
    """
    if t < 0:
        return 1 - student_tail(-t, dof)
    angle = math.atan2(t, math.sqrt(dof))
    squared = math.cos(angle) ** 2
    total = term = 1.0 if dof > 1 else 0.0
    for k in range(2 if dof % 2 else 1, dof - 2, 2):
        term *= k / (k + 1) * squared
        total += term
    inside = math.sin(angle) * total
    if dof % 2:
        inside = 2 / math.pi * (angle + math.cos(angle) * inside)
    return max(0.0, (1 - inside) / 2)


def _same_score(x: float, y: float) -> bool:
    return x == y or abs(x - y) <= _SAME_SCORE * max(1.0, abs(x), abs(y))


def _distinct(scores: Sequence[float | None]) -> list[float]:
    """The scores without repeats, ascending."""
    found: list[float] = []
    for score in sorted(score for score in scores if score is not None):
        if not found or not _same_score(score, found[-1]):
            found.append(score)
    return found


def _squares(values: Sequence[float]) -> float:
    """Σ (x - x̄)²."""
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values)


def _between(distinct: Sequence[Sequence[float]], mean: float, within: float) -> float:
    """Variance of the prompts' means beyond what the scores' own accounts for; infinite for one prompt."""
    if len(distinct) == 1:
        return math.inf
    sizes = [len(values) for values in distinct]
    total, others = sum(sizes), len(sizes) - 1
    seen = (
        math.fsum(d * (math.fsum(v) / d - mean) ** 2 for v, d in zip(distinct, sizes, strict=True)) / others
    )
    return max(0.0, (seen - within) * others / (total - sum(d**2 for d in sizes) / total))


def _variances(spread: Sequence[tuple[float, int]], pooled: float) -> dict[str, Any]:
    """`within` and `prior_samples` from sums of squares and their degrees of freedom; see `fit`."""
    half_gammas = [_half_gammas(dof) for _, dof in spread]
    logs = [
        math.log(squares / dof) - digamma + math.log(dof / 2)
        for (squares, dof), (digamma, _) in zip(spread, half_gammas, strict=True)
    ]
    mean = math.fsum(logs) / len(logs)
    excess = math.fsum((x - mean) ** 2 for x in logs) / max(1, len(logs) - 1)
    excess -= math.fsum(trigamma for _, trigamma in half_gammas) / len(logs)
    candidates = {dof: _half_gammas(dof) for dof in range(1, _MOST_PRIOR + 1)}
    prior = min(candidates, key=lambda dof: abs(candidates[dof][1] - excess))
    if prior == _MOST_PRIOR:
        return {"within": pooled, "prior_samples": prior}
    return {"within": math.exp(mean + candidates[prior][0] - math.log(prior / 2)), "prior_samples": prior}


def _half_gammas(dof: int) -> tuple[float, float]:
    """ψ(dof/2) and ψ'(dof/2), from those of 1/2 and 1 by ψ(x + 1) = ψ(x) + 1/x."""
    x = 0.5 if dof % 2 else 1.0
    digamma = -_EULER - (2 * math.log(2) if dof % 2 else 0.0)
    trigamma = math.pi**2 / (2 if dof % 2 else 6)
    while 2 * x < dof:
        digamma, trigamma, x = digamma + 1 / x, trigamma - 1 / x**2, x + 1
    return digamma, trigamma
