"""The search of all prompts together, in waves: choose, draw in one call, score in one pass, back up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_data import Encoder, Text
from rlhf_infer.engines.protocol import GenerationEngine, SamplingParams
from rlhf_infer.sampling.candidates import Extract
from rlhf_infer.search.results import SearchCost, SearchResult
from rlhf_infer.search.scorers import path_scorer
from rlhf_infer.search.settings import SearchSettings
from rlhf_infer.search.strategies import Strategy
from rlhf_infer.search.tree import SearchTree
from rlhf_infer.search.waves import Checker, DrawSteps, ScorePaths, SearchWaves


class TreeSearch:
    """Searches for the best completion of every prompt, step by step, with any engine and scorer.

    In a wave every prompt's tree chooses the nodes to extend; all their steps are drawn in one call of the
    engine (in several where numbers or lengths differ), and all that are new are scored in one packed pass.
    A step ends at the separator or with the completion. Samples have random numbers of their own, by seed,
    path and number: the same seed gives the same tree, whatever else is searched, and a search that is
    resumed from its trees, with more tokens too, gives the tree of one that was not interrupted.

    Args:
        engine: draws the steps.
        scorer: see `path_scorer`; it scores unfinished completions too.
        tokenizer: the policy's.
        settings: see `SearchSettings`.
        params: how steps are drawn; `max_new_tokens` is for the whole completion, as are stop texts.
        verifier: reward functions that score finished completions instead of `scorer`.
        checker: ends completions whose text so far is finished.
        extract: finds a text's answer, for votes.

    Raises:
        UserError: settings that do not go together.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        scorer: Any,
        tokenizer: Any,
        settings: SearchSettings,
        params: SamplingParams,
        *,
        verifier: Any = None,
        checker: Checker | None = None,
        extract: Extract | None = None,
    ) -> None:
        self.engine = engine
        self.scorer = path_scorer(scorer, settings.aggregate)
        self.verifier = None if verifier is None else path_scorer(verifier)
        self.waves = SearchWaves(
            self.scorer,
            tokenizer,
            settings,
            params,
            eos_token_ids=engine.eos_token_ids,
            verifier=self.verifier,
            checker=checker,
            extract=extract,
        )
        self._encoder = Encoder(tokenizer)

    @property
    def trees(self) -> list[SearchTree]:
        """Those of the last or the interrupted run."""
        return self.waves.trees

    @property
    def cost(self) -> SearchCost:
        """Cost of the last run."""
        return self.waves.cost

    def run(
        self,
        prompts: Sequence[Text],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        resume: Sequence[SearchTree] = (),
        on_wave: Callable[[Sequence[SearchTree]], None] | None = None,
        strategy: Callable[[], Strategy] | None = None,
    ) -> list[SearchResult]:
        """Search all prompts.

        Args:
            prompts: texts or message lists.
            columns: for scorers, one value per prompt for each further column.
            resume: trees of an interrupted or shorter run, one per prompt: what they have is not drawn or
                scored again.
            on_wave: called with the trees after every wave.
            strategy: makes the strategy of each prompt, in place of that of the settings.

        Returns:
            One result per prompt, in their order.

        Raises:
            UserError: a prompt does not fit the model, a scorer failed, or `resume` is of something else.
        """
        ids = [self._encoder.prompt(prompt) for prompt in prompts]
        check = getattr(self.engine, "check_lengths", None)
        if check is not None:
            check(ids, self.waves.params.max_new_tokens)
        calls = self.waves.calls(prompts, ids, columns, resume=resume, on_wave=on_wave, strategy=strategy)
        answer: Any = None
        while True:
            try:
                call = calls.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._answer(call)

    def _answer(self, call: DrawSteps | ScorePaths) -> Any:
        if isinstance(call, ScorePaths):
            scorer = self.verifier if call.verified and self.verifier is not None else self.scorer
            return scorer.score(call.paths)
        return self.engine.generate(call.paths, call.count, call.params, first=call.first)


class MCTSGenerator:
    """Monte Carlo tree search with one call: `TreeSearch` with the strategy `mcts`.

    Args:
        engine: draws the steps.
        scorer: scores unfinished completions, such as a process reward model; see `path_scorer`.
        tokenizer: the policy's.
        settings: see `SearchSettings`; its strategy does not count.
        params: see `TreeSearch`.
        verifier: see `TreeSearch`.
        checker: see `TreeSearch`.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        scorer: Any,
        tokenizer: Any,
        *,
        params: SamplingParams,
        settings: SearchSettings | None = None,
        verifier: Any = None,
        checker: Checker | None = None,
    ) -> None:
        settings = (settings or SearchSettings()).model_copy(update={"strategy": "mcts"})
        self.search = TreeSearch(
            engine, scorer, tokenizer, settings, params, verifier=verifier, checker=checker
        )

    def generate(
        self, prompts: Sequence[Text], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> list[SearchResult]:
        """See `TreeSearch.run`."""
        return self.search.run(prompts, columns)
