"""The search for a prompt's best completion: decides what to sample and score next, and does neither."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from rlhf_data import Text, UserError, as_completion
from rlhf_infer.engines.protocol import Rollout, SamplingParams
from rlhf_infer.engines.stop_strings import completion_text, goes_on_after
from rlhf_infer.rewards.checks import shown
from rlhf_infer.sampling.candidates import Candidate, Extract, SamplingCost, Selected, Selection, select
from rlhf_infer.sampling.confidence_stopping import ConfidenceBasedStopping


@dataclass(frozen=True)
class SearchRules:
    """Settings shared by the searches for several prompts.

    Args:
        n: samples of a prompt; with `stopping` the most of one (its own `max_samples` does not count).
        params: how they are drawn.
        tokenizer: the policy's tokenizer; it decodes completions.
        selection: see `select`.
        extract: finds the answer in a completion's text; None leaves `Candidate.answer` empty.
        stopping: ends a prompt's sampling early; None draws `n`.
        probabilities: what scores are, for `select`.
    """

    n: int
    params: SamplingParams
    tokenizer: Any
    selection: Selection = "best"
    extract: Extract | None = None
    stopping: ConfidenceBasedStopping | None = None
    probabilities: bool = False

    def __post_init__(self) -> None:
        if self.stopping is not None:
            least = min(self.stopping.min_samples, self.n)
            fitted = replace(self.stopping, max_samples=self.n, min_samples=least)
            object.__setattr__(self, "stopping", fitted)


class BestOfNSearch:
    """The search for one prompt's best completion; its caller draws and scores, at once or awaiting.

    ```
    while count := search.next_samples():
        search.add(draw(search.prompt_ids, count, first=len(search.candidates)))
        new = search.unscored()
        search.give_scores(new, *score(search.prompt, [each.text for each in new]))
    selected = search.selected()
    ```

    Completions that are the same token by token are scored once. Without scores the last lines but one are
    left out.

    Args:
        prompt: what reward functions read: a text or messages.
        prompt_ids: what the policy reads.
        rules: see `SearchRules`.
    """

    def __init__(self, prompt: Text, prompt_ids: Sequence[int], rules: SearchRules) -> None:
        self.prompt, self.prompt_ids, self.rules = prompt, prompt_ids, rules
        self.candidates: list[Candidate] = []
        self._rounds = 0
        self._scored_tokens: int | None = None
        self._given: set[int] = set()  # places of what `give_scores` took, also if nothing scored it
        self._first: dict[tuple[int, ...], int] = {}  # where each distinct completion came first

    @property
    def scores(self) -> list[float | None]:
        """Of the candidates drawn so far; None for one that nothing scored."""
        return [candidate.score for candidate in self.candidates]

    @property
    def confidences(self) -> list[float]:
        """Log-probabilities of the candidates drawn so far."""
        return [candidate.confidence for candidate in self.candidates]

    def next_samples(self) -> int:
        """How many more samples to draw now; 0 at the end."""
        if self.rules.stopping is None:
            return self.rules.n - len(self.candidates)
        return self.rules.stopping.next_samples(self.scores, self.confidences)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Take the next samples, all that were drawn in one round."""
        self._rounds += 1
        extract, after = self.rules.extract, goes_on_after(self.prompt, self.prompt_ids)
        for rollout in rollouts:
            text = completion_text(self.rules.tokenizer, rollout.completion_ids, self.rules.params, after)
            answer = None if extract is None else extract(text)
            self._first.setdefault(tuple(rollout.completion_ids), len(self.candidates))
            self.candidates.append(Candidate(len(self.candidates), text, rollout, answer=answer))
        self._score_repeats()

    def unscored(self) -> list[Candidate]:
        """The distinct completions that have not been given to `give_scores` yet."""
        return [self.candidates[place] for place in self._first.values() if place not in self._given]

    def completion(self, candidate: Candidate) -> Text:
        """A completion as reward functions read it: a text, or after messages the assistant's message."""
        return as_completion(self.prompt, candidate.text)

    def give_scores(
        self,
        candidates: Sequence[Candidate],
        totals: Sequence[float | None],
        by_name: Mapping[str, Sequence[float | None]],
    ) -> None:
        """Take scores, also for the repeats of what was scored.

        Args:
            candidates: B of those that `unscored` gave.
            totals: (B,) the weighted sums; None or NaN if nothing scored a candidate.
            by_name: (B,) of each reward function, not weighted; None or NaN where it is not applicable.
        """
        tokens = sum(len(candidate.rollout.completion_ids) for candidate in candidates)
        if candidates:
            self._scored_tokens = (self._scored_tokens or 0) + len(self.prompt_ids) + tokens
        for i, (candidate, total) in enumerate(zip(candidates, totals, strict=True)):
            own = ((name, values[i]) for name, values in by_name.items())
            scores = {name: x for name, x in own if _is_known(x)}
            score = total if _is_known(total) else None
            self.candidates[candidate.index] = replace(candidate, score=score, scores=scores)
            self._given.add(candidate.index)
        self._score_repeats()

    def _score_repeats(self) -> None:
        for place, candidate in enumerate(self.candidates):
            original = self.candidates[self._first[tuple(candidate.rollout.completion_ids)]]
            if candidate.score is None and original.score is not None:
                self.candidates[place] = replace(candidate, score=original.score, scores=original.scores)

    def selected(self) -> Selected:
        """The candidates drawn so far and their order.

        Raises:
            UserError: they were to be scored, and none of them has a score.
        """
        drawn = len(self.candidates)
        if self._given and all(score is None for score in self.scores):
            raise UserError(
                f"no reward function is applicable to any of the {drawn} candidates of the prompt "
                f"{shown(self.prompt)}, all returned None; add one that is, or leave such prompts out",
                code="no_applicable_reward",
            )
        cost = SamplingCost(
            samples=drawn,
            prompt_tokens=self._rounds * len(self.prompt_ids),
            completion_tokens=sum(len(each.rollout.completion_ids) for each in self.candidates),
            scored_tokens=self._scored_tokens,
            saved_samples=self.rules.n - drawn,
        )
        ranking = select(self.candidates, self.rules.selection, probabilities=self.rules.probabilities)
        return Selected(self.prompt, tuple(self.candidates), ranking, cost)


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)
