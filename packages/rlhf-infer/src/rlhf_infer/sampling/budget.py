"""Adaptive best-of-N: a sampling budget allocated to prompts by expected gain."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_data import UserError, invalid_value
from rlhf_infer.sampling.score_model import Predictive, ScorePopulation, predict

_REACH, _INTERVALS = 8.0, 128
"""Standard deviations above the best score up to which gains are integrated, and Simpson's intervals."""
_UNIT = ScorePopulation(0.0, 1.0, math.inf, 1)
"""Spread of the scores that is assumed until a prompt shows one; only ratios of gains matter then."""


@dataclass(frozen=True)
class AdaptiveComputeAllocator:
    """Gives a budget's samples to the prompts whose best score they raise most.

    The marginal gain of the k-th further sample, in a round in which nothing is scored in between, is
    E[max(b, X_1..X_k)] - E[max(b, X_1..X_{k-1})], b being the best score so far; see `MarginalGains`. The
    first one's is the expected improvement of Bayesian optimisation (Jones et al. 1998,
    https://doi.org/10.1023/A:1008306431147). Spending more where scores spread more is due to AdaBoN
    (arXiv:2505.12050). The gains of a prompt fall with k, so taking the largest one after the other maximises
    their sum. A prompt's mean and variance are shrunk towards those of all prompts, the more so the fewer its
    samples (`predict`, with the `ScorePopulation` of the scores so far).

    It holds no state: scores in, counts out.

    Args:
        min_samples: drawn of every prompt at first, at least 1.
        max_samples: never more of one prompt; None for no limit.
        batch: samples given out in a round, over all prompts; None for one per prompt.
        minimum_gain: in the unit of the scores, >= 0: the budget is not spent on less.

    Raises:
        UserError: a value outside its range.
    """

    min_samples: int = 4
    max_samples: int | None = None
    batch: int | None = None
    minimum_gain: float = 0.0

    def __post_init__(self) -> None:
        if self.min_samples < 1 or (self.max_samples is not None and self.max_samples < self.min_samples):
            raise invalid_value(
                f"allocator: min_samples is {self.min_samples} and max_samples {self.max_samples}; expected "
                "1 <= min_samples <= max_samples",
                "min_samples",
            )
        if self.batch is not None and self.batch < 1:
            raise invalid_value(
                f"allocator: batch is {self.batch}; expected at least 1 sample in a round", "batch"
            )
        if not 0 <= self.minimum_gain < math.inf:
            raise invalid_value(
                f"allocator: minimum_gain is {self.minimum_gain}; expected 0 or more", "minimum_gain"
            )

    def next_samples(
        self,
        scores: Sequence[Sequence[float | None]],
        budget: int,
        confidences: Sequence[Sequence[float]] | None = None,
    ) -> list[int]:
        """How many more samples to draw of each prompt in the next round; all 0 ends the search.

        Args:
            scores: scores of the samples drawn so far, for P prompts; None for a sample without a score.
            budget: samples left.
            confidences: log-probs of their whole completions (`Candidate.confidence`); None if they are
                not known.

        Returns:
            P counts, which sum to no more than the budget.

        Raises:
            UserError: the budget does not hold `min_samples` of every prompt that has fewer.
        """
        first = [max(0, self.min_samples - len(own)) for own in scores]
        if any(first):
            if sum(first) > budget:
                raise UserError(
                    f"the budget of {budget} samples does not hold min_samples={self.min_samples} of each of "
                    f"{len(scores)} prompts; expected at least {sum(first)}",
                    code="budget_too_small",
                )
            return first
        population = ScorePopulation.fit(scores) or _UNIT
        known = [
            predict(own, () if confidences is None else confidences[i], population=population)
            for i, own in enumerate(scores)
        ]
        room = [math.inf if self.max_samples is None else self.max_samples - len(own) for own in scores]
        return self._greedy(known, room, min(budget, self.batch or len(scores)))

    def _greedy(self, known: Sequence[Predictive | None], room: Sequence[float], count: int) -> list[int]:
        """Give out `count` samples, each where its gain is largest; of equal gains the prompt with fewer."""
        given = [0] * len(known)
        gains = [None if each is None else MarginalGains(each) for each in known]
        # Without a single score there is nothing to expect, and only drawing can tell: that comes first.
        heap = [(-math.inf if g is None else -g.at(1), 0, i) for i, g in enumerate(gains) if room[i] > 0]
        heapq.heapify(heap)
        while heap and sum(given) < count:
            negative_gain, _, i = heapq.heappop(heap)
            if -negative_gain <= self.minimum_gain:
                break
            given[i] += 1
            if given[i] < room[i]:
                own = gains[i]
                after = 0.0 if own is None else own.at(given[i] + 1)
                heapq.heappush(heap, (-after, given[i], i))
        return given


class MarginalGains:
    """Expected gain over the best score of the 1st, 2nd, ... further sample, the earlier ones drawn.

    With u = `unseen`, Q the normal tail and z = (best - mean) / std a sample exceeds best by more than
    std · y with probability u Q(z + y), and the k-th gain is
    std ∫_0^∞ (1 - u Q(z + y))^(k-1) u Q(z + y) dy; for k = 1 that is u std (φ(z) - z Q(z)).

    The std of `known` must be finite; its degrees of freedom are ignored.
    """

    def __init__(self, known: Predictive) -> None:
        z = (known.best - known.mean) / known.std
        grid = np.linspace(z, max(z, 0.0) + _REACH, _INTERVALS + 1)
        tail = np.array([math.erfc(y / math.sqrt(2)) / 2 for y in grid])
        simpson = np.ones(_INTERVALS + 1)
        simpson[1:-1:2], simpson[2:-1:2] = 4, 2
        self._exceeds = known.unseen * tail
        self._weights = known.std * (grid[1] - grid[0]) / 3 * simpson * self._exceeds

    def at(self, k: int) -> float:
        """The k-th gain."""
        return float(np.sum(self._weights * (1 - self._exceeds) ** (k - 1)))
