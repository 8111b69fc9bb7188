"""Candidates for an answer, selection of the winner, and their cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from rlhf_data import Text, UserError, check_choice

if TYPE_CHECKING:
    from rlhf_infer.engines.protocol import Rollout

Selection = Literal["best", "majority", "weighted", "none"]
"""How candidates are ranked, see `select`."""

VOTES = ("majority", "weighted")
"""Selections that count the candidates' answers."""

Extract = Callable[[str], str | None]
"""Gives the answer in a completion's text; None if there is none, which is not a vote."""


@dataclass(frozen=True)
class Candidate:
    """One completion of a prompt.

    Args:
        index: its number among the samples of its prompt, as the engine counts them.
        text: the completion as reward functions see it, without special tokens and the stop text at its end.
        rollout: how it was sampled.
        score: the weighted sum of the rewards; None if nothing scored it.
        scores: each reward, not weighted; those that do not apply are left out.
        answer: what the text answers; None if nothing was extracted.
    """

    index: int
    text: str
    rollout: Rollout
    score: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None

    @property
    def confidence(self) -> float:
        """Log-probability of the whole completion at the sampling temperature: the sum over its tokens."""
        return math.fsum(self.rollout.logps)


@dataclass(frozen=True)
class SamplingCost:
    """Cost of the candidates of a prompt; costs add up.

    Args:
        samples: completions drawn.
        prompt_tokens: prompt tokens computed by the engine: the prompt once for each round of drawing.
        completion_tokens: tokens of all completions drawn.
        scored_tokens: tokens of the policy's tokenizer that were scored: the prompt once a round, and every
            distinct completion once; None if nothing was scored.
        saved_samples: how many fewer than the fixed number were drawn; negative where more were.
    """

    samples: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    scored_tokens: int | None = None
    saved_samples: int = 0

    def __add__(self, other: SamplingCost) -> SamplingCost:
        scored = [c.scored_tokens for c in (self, other) if c.scored_tokens is not None]
        return SamplingCost(
            self.samples + other.samples,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            sum(scored) if scored else None,
            self.saved_samples + other.saved_samples,
        )

    @classmethod
    def total(cls, costs: Iterable[SamplingCost]) -> SamplingCost:
        """The sum of several costs."""
        return sum(costs, cls())

    @property
    def saved_share(self) -> float:
        """Share of the fixed number of samples that was not drawn; 0 if nothing was to be drawn."""
        fixed = self.samples + self.saved_samples
        return self.saved_samples / fixed if fixed else 0.0


@dataclass(frozen=True)
class Selected:
    """The candidates of a prompt and their order.

    Args:
        prompt: text or messages.
        candidates: in the order in which they were drawn.
        ranking: places in `candidates`, the winner's first.
        cost: what they cost.
    """

    prompt: Text
    candidates: Sequence[Candidate]
    ranking: tuple[int, ...]
    cost: SamplingCost

    @property
    def best(self) -> Candidate:
        """The winner."""
        return self.candidates[self.ranking[0]]

    def top(self, k: int) -> list[Candidate]:
        """The first `k` of the ranking, all if there are fewer."""
        return [self.candidates[i] for i in self.ranking[:k]]


def select(
    candidates: Sequence[Candidate],
    selection: Selection,
    *,
    extract: Extract | None = None,
    probabilities: bool = False,
) -> tuple[int, ...]:
    """Rank candidates.

    - "best": by score; of equal ones the lower index first; candidates without a score last.
    - "majority": by the number of candidates with the same answer, whatever their scores, then by score, then
      by index; candidates without an answer last (self-consistency, arXiv:2203.11171).
    - "weighted": the same, each vote weighted by a verifier's probability that the candidate is right
      (arXiv:2206.02336, section 3.2, which adds up these probabilities): the score, or its sigmoid if scores
      are logits. A candidate without a score has no weight next to scored ones; without any score it is a
      plain majority.
    - "none": as they were drawn.

    Args:
        candidates: of one prompt.
        selection: see above.
        extract: for votes, finds a text's answer; None takes the candidates' own `answer`.
        probabilities: whether scores are probabilities in [0, 1], as those of process reward models, judges
            and checkers of answers are; otherwise they are logits.

    Returns:
        Places in `candidates`, the winner's first.

    Raises:
        UserError: another name.
    """
    check_choice("selection", selection, get_args(Selection))
    if selection == "none":
        return tuple(sorted(range(len(candidates)), key=lambda place: candidates[place].index))
    weights = [0.0] * len(candidates)
    answers: list[str | None] = [None] * len(candidates)
    if selection in VOTES:
        answers = [c.answer if extract is None else extract(c.text) for c in candidates]
        weights = _votes(candidates, selection, probabilities)
    totals = answer_weights(answers, weights)

    def rank(place: int) -> tuple[float, float, int]:
        answer, score = answers[place], candidates[place].score
        weight = -1.0 if answer is None else totals[answer]
        return -weight, math.inf if score is None else -score, candidates[place].index

    return tuple(sorted(range(len(candidates)), key=rank))


def check_extract(selection: str, extract: Extract | None) -> None:
    """Refuse votes without the function that finds what is voted for."""
    if selection in VOTES and extract is None:
        raise UserError(
            f"selection {selection} needs extract, which finds the answer in a completion; give one",
            code="missing_extract",
        )


def answer_weights(answers: Sequence[str | None], weights: Sequence[float]) -> dict[str, float]:
    """The weight that speaks for each answer, in the order in which they first come.

    An answer of None is not a vote.
    """
    return {
        answer: math.fsum(w for w, own in zip(weights, answers, strict=True) if own == answer)
        for answer in answers
        if answer is not None
    }


def _votes(candidates: Sequence[Candidate], selection: str, probabilities: bool) -> list[float]:
    """The weight of each candidate's vote."""
    if selection == "majority" or all(c.score is None for c in candidates):
        return [1.0] * len(candidates)
    if probabilities:
        found = [c.score or 0.0 for c in candidates]
        if wrong := next((score for score in found if not 0 <= score <= 1), None):
            raise UserError(
                f"a reward with is_probability gave {wrong:g}; expected a number from 0 to 1, or leave the "
                "attribute out",
                code="not_a_probability",
            )
        return found
    # sigmoid(x) = (1 + tanh(x/2)) / 2, which overflows nowhere
    return [0.0 if c.score is None else (1 + math.tanh(c.score / 2)) / 2 for c in candidates]
