"""Early stopping of best-of-N once the best candidate is unlikely to be beaten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_data import invalid_value
from rlhf_infer.sampling.score_model import ScorePopulation, predict


@dataclass(frozen=True)
class ConfidenceBasedStopping:
    """Stops once the rest of the samples would hardly bring a better one.

    After n samples the rule asks how likely one of the `max_samples` - n others beats the best so far by more
    than `tolerance`: 1 - (1 - q)^(max_samples - n), q the chance of one sample (`Predictive.chance`). Below
    `probability` it stops, so the winner is that of all `max_samples` in at least about 1 - `probability` of
    the prompts. q is a product of two:

    - that the sample is not a repeat, from how often scores repeat and from token confidence: the probability
      that the policy gives the completions drawn (`unseen_share`). A sure policy repeats itself, and a scorer
      of few values is exhausted soon.
    - that a score that is new is better, from the scores' mean and spread with Student's correction for their
      small number (`predict`).

    It holds no state: the same numbers give the same answer, for a batch of prompts or in a server.

    Args:
        min_samples: drawn at first, at least 1.
        max_samples: never more than these.
        batch: drawn at a time after the first ones, at least 1.
        probability: in [0, 1]; 0 never stops before `max_samples`.
        tolerance: gain in score too small for another sample, >= 0.
        highest: the highest score there is, such as 1 for an answer that is right; a candidate that has it
            ends the search.
        population: how scores vary, from other prompts (`ScorePopulation.fit`); None judges every prompt by
            itself.

    Raises:
        UserError: a value outside its range.
    """

    min_samples: int = 4
    max_samples: int = 16
    batch: int = 4
    probability: float = 0.1
    tolerance: float = 0.0
    highest: float = math.inf
    population: ScorePopulation | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.max_samples:
            raise invalid_value(
                f"stopping: min_samples is {self.min_samples} and max_samples {self.max_samples}; expected "
                "1 <= min_samples <= max_samples",
                "min_samples",
            )
        if self.batch < 1:
            raise invalid_value(
                f"stopping: batch is {self.batch}; expected at least 1 sample at a time", "batch"
            )
        if not 0 <= self.probability <= 1:
            raise invalid_value(
                f"stopping: probability is {self.probability}; expected a number from 0 to 1", "probability"
            )
        if not 0 <= self.tolerance < math.inf or math.isnan(self.highest):
            raise invalid_value(
                f"stopping: tolerance is {self.tolerance} and highest {self.highest}; expected numbers, "
                "tolerance at least 0",
                "tolerance",
            )

    def next_samples(self, scores: Sequence[float | None], confidences: Sequence[float] = ()) -> int:
        """How many more samples to draw of a prompt; 0 stops.

        Args:
            scores: scores of the n samples drawn so far; None for a sample without one.
            confidences: log-probs of their whole completions (`Candidate.confidence`), not of a mean token;
                empty if they are not known.
        """
        count = len(scores)
        if count < self.min_samples:
            return self.min_samples - count
        if count >= self.max_samples or self.chance(scores, confidences) < self.probability:
            return 0
        if any(score is not None and score >= self.highest for score in scores):
            return 0
        return min(self.batch, self.max_samples - count)

    def chance(self, scores: Sequence[float | None], confidences: Sequence[float] = ()) -> float:
        """Probability that one of the samples up to `max_samples` beats the best by more than `tolerance`.

        1 if there is no score yet. The samples are taken as independent given q; as q itself is uncertain,
        the true probability is smaller (Jensen's inequality).
        """
        known = predict(scores, confidences, population=self.population)
        if known is None:
            return 1.0
        return 1 - (1 - known.chance(self.tolerance)) ** max(0, self.max_samples - len(scores))
