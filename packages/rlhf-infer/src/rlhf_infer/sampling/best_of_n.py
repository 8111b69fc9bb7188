"""Best-of-N: draw several completions of every prompt, score them, keep the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rlhf_data import Encoder, Text, UserError, check_choice, invalid_value
from rlhf_infer.engines.protocol import GenerationEngine, SamplingParams
from rlhf_infer.rewards.combine import RewardFunctions
from rlhf_infer.rewards.conventions import RewardFunction
from rlhf_infer.rewards.requirements import check_column_lengths
from rlhf_infer.sampling.budget import AdaptiveComputeAllocator
from rlhf_infer.sampling.candidates import Extract, Selected, Selection, check_extract
from rlhf_infer.sampling.confidence_stopping import ConfidenceBasedStopping
from rlhf_infer.sampling.search import BestOfNSearch, SearchRules


class BestOfNSampler:
    """Draws `n` completions of each prompt with any engine and ranks them.

    Unless `adaptive` is given all are drawn in one call of the engine and scored in one call of the reward
    functions, so that samples share their prompts in both. With a stopping rule they are drawn in
    rounds, and a prompt is finished once its best is unlikely to be beaten. An allocator spends a budget over
    all prompts where the expected gain is largest. A prompt's samples do not depend on the rounds: sample i
    has the same random numbers.

    Completions of a prompt that are the same token by token are scored once.

    Args:
        engine: samples.
        scorer: reward functions, or one, or several with weight 1 each; None for no scores, with selection
            "majority" or "none", or n of 1.
        tokenizer: the policy's tokenizer; it encodes prompts as training does, messages through its chat
            template, and decodes completions without special tokens.
        n: samples of a prompt; with a stopping rule the most of one (its `max_samples` does not count here),
            with an allocator the mean.
        params: how to sample.
        selection: see `select`.
        extract: for votes, see `select`; it also fills `Candidate.answer`.
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
        check_best_of_n(n, params, selection, scorer, extract, adaptive)
        self.engine, self.tokenizer = engine, tokenizer
        self.scorer = _reward_functions(scorer)
        self.n, self.params, self.adaptive = n, params, adaptive
        stopping = adaptive if isinstance(adaptive, ConfidenceBasedStopping) else None
        probabilities = self.scorer is not None and self.scorer.gives_probability
        self.rules = SearchRules(n, params, tokenizer, selection, extract, stopping, probabilities)
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
                the model, a reward function that failed, or a prompt none of whose candidates was scored.
        """
        if budget is not None and not isinstance(self.adaptive, AdaptiveComputeAllocator):
            raise UserError(
                "a budget is shared out by an allocator; make the sampler with one, or leave budget out",
                code="missing_allocator",
            )
        columns = dict(columns or {})
        check_column_lengths(columns, len(prompts))
        searches = [BestOfNSearch(prompt, self._encoder.prompt(prompt), self.rules) for prompt in prompts]
        budget = self.n * len(prompts) if budget is None else budget
        while any(counts := self._next_counts(searches, budget)):
            self._draw(searches, counts)
            if self.scorer is not None:
                self._score(self.scorer, searches, columns)
        return [search.selected() for search in searches]

    def _next_counts(self, searches: Sequence[BestOfNSearch], budget: int) -> list[int]:
        """How many more samples each prompt gets now; all 0 at the end."""
        if not isinstance(self.adaptive, AdaptiveComputeAllocator):
            return [search.next_samples() for search in searches]
        spent = sum(len(search.candidates) for search in searches)
        return self.adaptive.next_samples(
            [search.scores for search in searches],
            budget - spent,
            [search.confidences for search in searches],
        )

    def _draw(self, searches: Sequence[BestOfNSearch], counts: Sequence[int]) -> None:
        """Add candidates; prompts that have and get as many as each other go to the engine together."""
        calls: dict[tuple[int, int], list[BestOfNSearch]] = {}
        for search, count in zip(searches, counts, strict=True):
            if count:
                calls.setdefault((len(search.candidates), count), []).append(search)
        for (first, count), members in calls.items():
            groups = self.engine.generate([s.prompt_ids for s in members], count, self.params, first=first)
            for search, rollouts in zip(members, groups, strict=True):
                search.add(rollouts)

    def _score(
        self,
        scorer: RewardFunctions,
        searches: Sequence[BestOfNSearch],
        columns: Mapping[str, Sequence[Any]],
    ) -> None:
        """Score what has no score yet, of all prompts in one call."""
        new = [(i, each) for i, search in enumerate(searches) for each in search.unscored()]
        if not new:  # nothing but repeats was drawn
            return
        scored = scorer(
            [searches[i].prompt for i, _ in new],
            [searches[i].completion(each) for i, each in new],
            completion_ids=[each.rollout.completion_ids for _, each in new],
            columns={name: [values[i] for i, _ in new] for name, values in columns.items()},
            fill_in=False,
        )
        totals, rows = scored.total.tolist(), scored.rewards.tolist()
        start = 0
        for search in searches:
            own = search.unscored()
            part = slice(start, start + len(own))
            by_name = {name: row[part] for name, row in zip(scored.names, rows, strict=True)}
            search.give_scores(own, totals[part], by_name)
            start = part.stop


def _reward_functions(
    scorer: RewardFunctions | RewardFunction | Sequence[RewardFunction] | None,
) -> RewardFunctions | None:
    if scorer is None or isinstance(scorer, RewardFunctions):
        return scorer
    return RewardFunctions(list(scorer) if isinstance(scorer, Sequence) else [scorer])


def check_best_of_n(
    n: int,
    params: SamplingParams,
    selection: str,
    scorer: Any,
    extract: Extract | None,
    adaptive: ConfidenceBasedStopping | AdaptiveComputeAllocator | None,
) -> None:
    """Refuse settings of `BestOfNSampler` that do not go together.

    Raises:
        UserError: they do not.
    """
    check_choice("selection", selection, get_args(Selection))
    if n < 1:
        raise invalid_value(f"n is {n}; expected at least 1 sample of a prompt", "n")
    if n > 1 and params.temperature == 0:
        raise invalid_value(
            f"temperature is 0, so that all n={n} samples of a prompt are the same; raise it, or set n to 1",
            "temperature",
        )
    chosen_by_score = n > 1 and selection in ("best", "weighted")  # of one there is nothing to choose
    if scorer is None and (chosen_by_score or adaptive is not None):
        raise UserError(
            "choosing the best candidate needs a scorer; give one, set n to 1, or take selection "
            "majority and draw a fixed number of samples",
            code="missing_scorer",
        )
    check_extract(selection, extract)
    if selection != "best" and adaptive is not None:
        raise invalid_value(
            f"adaptive sampling judges by the best score, which does not decide selection {selection}; take "
            "selection best, or draw a fixed number of samples",
            "selection",
        )
