"""One request for candidates: generate, score, select."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_data import Message, Text, UserError
from rlhf_infer import (
    BestOfNSearch,
    Candidate,
    OnToken,
    PromptLogps,
    Rollout,
    SearchRules,
    Selected,
    extractor,
)
from rlhf_infer.async_loop import gather_all
from rlhf_infer.sampling.candidates import VOTES
from rlhf_serve.backends.protocol import Backend, Draw
from rlhf_serve.service.requests import GenerationRequest, Timing
from rlhf_serve.service.scoring_queue import Scoring
from rlhf_serve.service.tokenization import ChatTokenizer
from rlhf_serve.service.tree_search import TreeSearchService


@dataclass(frozen=True)
class GenerationResult:
    """The candidates of a request, their ranking and cost, and the log-probs of the prompt if requested."""

    request: GenerationRequest
    selected: Selected
    prompt: PromptLogps | None = None

    @property
    def chosen(self) -> list[Candidate]:
        """The choices that are returned."""
        return self.selected.top(self.request.n)


class BestOfNService:
    """Draws candidates, scores them, and ranks them.

    `scoring` is None for a server without reward; `messages` says whether reward functions get conversations
    as messages.
    """

    def __init__(
        self,
        backend: Backend,
        chat_tokenizer: ChatTokenizer,
        scoring: Scoring | None,
        *,
        messages: bool = True,
        answer: str = "text",
    ) -> None:
        self.backend, self.chat_tokenizer, self.scoring = backend, chat_tokenizer, scoring
        self.messages = messages
        self._extract = extractor(answer)
        self._trees = scoring and TreeSearchService(backend, chat_tokenizer, scoring, self._extract)

    def as_scored(self, messages: list[Message], template: Mapping[str, Any] | None = None) -> Text:
        """A conversation as reward functions read it: as messages, or as the text that the policy reads.

        Raises:
            APIError: the chat template refuses the messages.
        """
        return messages if self.messages else self.chat_tokenizer.rendered(messages, template)

    async def run(
        self, request: GenerationRequest, timing: Timing, on_token: OnToken | None = None
    ) -> GenerationResult:
        """Draw and rank the candidates of a request.

        `on_token` is called as tokens come; `timing` receives the seconds.

        Raises:
            APIError: a reward function cannot score one of them, or none of them has a score.
            UserError: the backend cannot draw them.
        """
        if request.search is not None and self._trees is not None:
            return GenerationResult(request, await self._trees.run(request, timing))
        rules = SearchRules(
            request.candidates,
            request.params,
            self.chat_tokenizer.tokenizer,
            request.selection,
            self._extract if request.selection in VOTES else None,
            request.stopping,
            probabilities=self.scoring is not None and self.scoring.rewards.gives_probability,
        )
        search = BestOfNSearch(request.prompt, request.prompt_ids, rules)
        while count := search.next_samples():
            await self._draw(request, search, count, timing, on_token)
            if request.scored and self.scoring is not None:
                await self._score(self.scoring, search, request, timing)
        try:
            return GenerationResult(request, search.selected())
        except UserError as error:
            assert self.scoring is not None
            raise self.scoring.nothing_scored(str(error)) from error

    async def run_all(self, requests: Sequence[GenerationRequest], timing: Timing) -> list[GenerationResult]:
        """The results of several requests, processed concurrently."""
        timings = [Timing() for _ in requests]
        logps = await self._prompt_logps(requests, timing)
        found = await gather_all(self.run(o, t) for o, t in zip(requests, timings, strict=True))
        found = [replace(each, prompt=logps.get(i)) for i, each in enumerate(found)]
        timing.generate_s += sum(each.generate_s for each in timings)
        timing.score_s += sum(each.score_s for each in timings)
        timing.prompts = timings if len(timings) > 1 else []
        return found

    async def _prompt_logps(
        self, requests: Sequence[GenerationRequest], timing: Timing
    ) -> dict[int, PromptLogps]:
        """Log-probs of the prompts for which they are requested, by index."""
        asked = {i: each for i, each in enumerate(requests) if each.prompt_logprobs is not None}
        if not asked:
            return {}
        start = time.perf_counter()
        top = max(each.prompt_logprobs or 0 for each in asked.values())
        found = await self.backend.prompt_logps([each.prompt_ids for each in asked.values()], top)
        timing.generate_s += time.perf_counter() - start
        return dict(zip(asked, found, strict=True))

    async def _draw(
        self,
        request: GenerationRequest,
        search: BestOfNSearch,
        count: int,
        timing: Timing,
        on_token: OnToken | None,
    ) -> None:
        if not request.draws:
            return search.add([Rollout(request.prompt_ids, [], [], "length")])
        start = time.perf_counter()
        first = len(search.candidates)
        draw = Draw(request.prompt_ids, count, request.params, first, request.reproducible, request.logps)
        search.add(await self.backend.generate(draw, on_token))
        timing.generate_s += time.perf_counter() - start

    async def _score(
        self, scoring: Scoring, search: BestOfNSearch, request: GenerationRequest, timing: Timing
    ) -> None:
        """Score the candidates that have no score yet; repeats have theirs already."""
        if not (new := search.unscored()):
            return
        start = time.perf_counter()
        found = await scoring.score(
            [search.prompt] * len(new),
            [search.completion(each) for each in new],
            {name: [value] * len(new) for name, value in request.columns.items()},
        )
        timing.score_s += time.perf_counter() - start
        search.give_scores(new, found.total, found.by_name)

    async def close(self) -> None:
        """Cancel running work."""
        await self.backend.close()
        if self.scoring is not None:
            await asyncio.to_thread(self.scoring.close)
        self.chat_tokenizer.workers.close()
        self.chat_tokenizer.compilers.close()
