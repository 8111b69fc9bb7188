"""Best-of-N: draw several completions of every prompt, score them, keep the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_data import UserError
from rlhf_data.encoding import Encoder
from rlhf_data.transcripts import Text
from rlhf_infer.adaptive import AdaptiveComputeAllocator
from rlhf_infer.candidates import (
    Candidate,
    Extract,
    SamplingCost,
    Selected,
    Selection,
    check_selection,
    select,
)
from rlhf_infer.protocol import GenerationEngine, Rollout, SamplingParams
from rlhf_infer.rewards.calling import RewardFunction
from rlhf_infer.rewards.functions import RewardFunctions
from rlhf_infer.stopping import ConfidenceBasedStopping


class BestOfNSampler:
    """Draws `n` completions of each prompt with any engine and ranks them.

    Unless `adaptive` is given all are drawn in one call of the engine and scored in one call of the reward
    functions, so that samples share their prompts in both. With a stopping rule they come in rounds, and a
    prompt leaves once its best is unlikely to be beaten. With an allocator a budget over all prompts goes
    where it pays. A prompt's samples are the same whatever the rounds: sample i has the same random numbers.

    Completions of a prompt that are the same token by token are scored once.

    Args:
        engine: samples.
        scorer: reward functions, or one, or several with weight 1 each; None leaves scores out, which goes
            with a plain majority.
        tokenizer: of the policy; it encodes prompts as training encodes them, messages through its chat
            template, and decodes completions without special tokens.
        n: samples of a prompt; with a stopping rule the most of one (its `max_samples` does not count here),
            with an allocator the mean.
        params: how to sample.
        selection: see `select`.
        extract: for "majority", see `select`; it also fills `Candidate.answer`.
        adaptive: ends a prompt's sampling early, or shares out a budget among the prompts; None draws `n` of
            each.

    Raises:
        UserError: settings that do not go together.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        scorer: RewardFunctions | RewardFunction | Sequence[RewardFunction] | None,
        tokenizer: Any,
        *,
        n: int,
        params: SamplingParams,
        selection: Selection = "best",
        extract: Extract | None = None,
        adaptive: ConfidenceBasedStopping | AdaptiveComputeAllocator | None = None,
    ) -> None:
        _check(n, params, selection, scorer, extract, adaptive)
        self.engine, self.tokenizer = engine, tokenizer
        self.scorer = _reward_functions(scorer)
        self.n, self.params, self.extract = n, params, extract
        self.selection: Selection = selection
        if isinstance(adaptive, ConfidenceBasedStopping):
            adaptive = replace(adaptive, max_samples=n, min_samples=min(adaptive.min_samples, n))
        self.adaptive = adaptive
        self._encoder = Encoder(tokenizer)

    def sample(
        self,
        prompts: Sequence[Text],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        budget: int | None = None,
    ) -> list[Selected]:
        """Draw, score and rank candidates of each prompt.

        Args:
            prompts: texts or message lists.
            columns: for the reward functions, one value per prompt for each further column.
            budget: samples over all prompts, for an allocator; None for `n` per prompt.

        Returns:
            One result per prompt, in their order.

        Raises:
            UserError: a budget without an allocator, columns of another length, a prompt that does not fit
                the model, or a reward function that failed.
        """
        if budget is not None and not isinstance(self.adaptive, AdaptiveComputeAllocator):
            raise UserError(
                "a budget is shared out by an allocator; make the sampler with one, or leave budget out"
            )
        columns = dict(columns or {})
        for name, values in columns.items():
            if len(values) != len(prompts):
                raise UserError(
                    f"column {name} has {len(values)} values for {len(prompts)} prompts; expected one each"
                )
        searches = [
            _Search(
                prompt, self._encoder.prompt(prompt), {name: values[i] for name, values in columns.items()}
            )
            for i, prompt in enumerate(prompts)
        ]
        budget = self.n * len(prompts) if budget is None else budget
        while any(counts := self._next_counts(searches, budget)):
            self._draw(searches, counts)
            self._score([search for search, count in zip(searches, counts, strict=True) if count])
        return [self._selected(search) for search in searches]

    def _next_counts(self, searches: Sequence[_Search], budget: int) -> list[int]:
        """How many more samples each prompt gets now; all 0 at the end."""
        if self.adaptive is None:
            return [self.n - len(search.candidates) for search in searches]
        if isinstance(self.adaptive, ConfidenceBasedStopping):
            return [search.next_samples(self.adaptive) for search in searches]
        spent = sum(len(search.candidates) for search in searches)
        return self.adaptive.next_samples(
            [search.scores for search in searches],
            budget - spent,
            [search.confidences for search in searches],
        )

    def _draw(self, searches: Sequence[_Search], counts: Sequence[int]) -> None:
        """Add candidates; prompts that have and get as many as each other go to the engine together."""
        calls: dict[tuple[int, int], list[_Search]] = {}
        for search, count in zip(searches, counts, strict=True):
            if count:
                calls.setdefault((len(search.candidates), count), []).append(search)
        for (first, count), members in calls.items():
            groups = self.engine.generate([s.prompt_ids for s in members], count, self.params, first=first)
            for search, rollouts in zip(members, groups, strict=True):
                search.rounds += 1
                for rollout in rollouts:
                    search.add(self._candidate(len(search.candidates), rollout))

    def _candidate(self, index: int, rollout: Rollout) -> Candidate:
        text = self.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)
        return Candidate(index, text, rollout, answer=None if self.extract is None else self.extract(text))

    def _score(self, searches: Sequence[_Search]) -> None:
        """Score what has no score yet, each distinct completion once, and hand the scores to its repeats."""
        if self.scorer is None:
            return
        new = [(search, candidate) for search in searches for candidate in search.unscored()]
        for search in {id(search): search for search, _ in new}.values():
            search.scored_tokens += len(search.prompt_ids)
        if new:
            names = {name for search in searches for name in search.columns}
            scored = self.scorer(
                [search.prompt for search, _ in new],
                [_as_completion(search.prompt, candidate.text) for search, candidate in new],
                completion_ids=[candidate.rollout.completion_ids for _, candidate in new],
                columns={name: [search.columns[name] for search, _ in new] for name in names},
            )
            rows, totals = scored.rewards.T.tolist(), scored.total.tolist()
            for (search, candidate), row, total in zip(new, rows, totals, strict=True):
                applicable = {name: x for name, x in zip(scored.names, row, strict=True) if x == x}  # no NaN
                search.give(candidate, total, applicable)
        for search in searches:
            search.repeat_scores()

    def _selected(self, search: _Search) -> Selected:
        candidates = search.candidates
        ranking = select(candidates, self.selection)
        return Selected(search.prompt, tuple(candidates), ranking, search.cost(self.n, self.scorer))


@dataclass
class _Search:
    """The search for one prompt's best completion."""

    prompt: Text
    prompt_ids: list[int]
    columns: Mapping[str, Any]
    candidates: list[Candidate] = field(default_factory=list)
    rounds: int = 0
    stopped: bool = False
    scored_tokens: int = 0
    _first: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Where each distinct completion came first."""

    @property
    def scores(self) -> list[float | None]:
        return [candidate.score for candidate in self.candidates]

    @property
    def confidences(self) -> list[float]:
        return [candidate.confidence for candidate in self.candidates]

    def next_samples(self, rule: ConfidenceBasedStopping) -> int:
        more = 0 if self.stopped else rule.next_samples(self.scores, self.confidences)
        self.stopped = not more
        return more

    def add(self, candidate: Candidate) -> None:
        self._first.setdefault(tuple(candidate.rollout.completion_ids), len(self.candidates))
        self.candidates.append(candidate)

    def unscored(self) -> list[Candidate]:
        """The distinct completions without a score."""
        found = [self.candidates[place] for place in self._first.values()]
        return [candidate for candidate in found if candidate.score is None]

    def give(self, candidate: Candidate, score: float, scores: Mapping[str, float]) -> None:
        self.scored_tokens += len(candidate.rollout.completion_ids)
        self.candidates[candidate.index] = replace(candidate, score=score, scores=scores)

    def repeat_scores(self) -> None:
        for place, candidate in enumerate(self.candidates):
            original = self.candidates[self._first[tuple(candidate.rollout.completion_ids)]]
            if candidate.score is None:
                self.candidates[place] = replace(candidate, score=original.score, scores=original.scores)

    def cost(self, n: int, scorer: RewardFunctions | None) -> SamplingCost:
        drawn = len(self.candidates)
        return SamplingCost(
            samples=drawn,
            prompt_tokens=self.rounds * len(self.prompt_ids),
            completion_tokens=sum(len(candidate.rollout.completion_ids) for candidate in self.candidates),
            scored_tokens=None if scorer is None else self.scored_tokens,
            saved_samples=n - drawn,
        )


def _as_completion(prompt: Text, text: str) -> Text:
    """A completion as reward functions see it: a text, or after messages the assistant's message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _reward_functions(
    scorer: RewardFunctions | RewardFunction | Sequence[RewardFunction] | None,
) -> RewardFunctions | None:
    if scorer is None or isinstance(scorer, RewardFunctions):
        return scorer
    return RewardFunctions(list(scorer) if isinstance(scorer, Sequence) else [scorer])


def _check(
    n: int,
    params: SamplingParams,
    selection: str,
    scorer: Any,
    extract: Extract | None,
    adaptive: ConfidenceBasedStopping | AdaptiveComputeAllocator | None,
) -> None:
    check_selection(selection)
    if n < 1:
        raise UserError(f"n is {n}; expected at least 1 sample of a prompt")
    if n > 1 and params.temperature == 0:
        raise UserError(
            f"temperature is 0, so that all n={n} samples of a prompt are the same; raise it, or set n to 1"
        )
    if scorer is None and (selection == "best" or adaptive is not None):
        raise UserError(
            "there is no scorer to tell which candidate is best; give one, or take selection majority and "
            "draw a fixed number of samples"
        )
    if selection == "majority" and extract is None:
        raise UserError("selection majority needs extract, which finds the answer in a completion; give one")
    if selection == "majority" and adaptive is not None:
        raise UserError(
            "adaptive sampling judges by the best score, which decides no majority; take selection best, or "
            "draw a fixed number of samples"
        )
