"""One request for a tree search: steps are drawn and scored beside those of all other requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlhf_data import UserError, as_completion
from rlhf_infer import (
    DrawSteps,
    Extract,
    PathScores,
    ScorePaths,
    SearchSettings,
    SearchWaves,
    Selected,
    StepCalls,
    path_scorer,
)
from rlhf_infer.async_loop import gather_all
from rlhf_serve.backends.protocol import Backend, Draw
from rlhf_serve.errors import invalid_request, refused
from rlhf_serve.service.requests import GenerationRequest, Timing
from rlhf_serve.service.scoring_queue import Scoring
from rlhf_serve.service.tokenization import ChatTokenizer


class TreeSearchService:
    """Searches the tree of a prompt, with the backend and the rewards of all requests.

    Trees grow in the threads of `chat_tokenizer`; `extract` finds a text's answer, for votes.
    """

    def __init__(
        self, backend: Backend, chat_tokenizer: ChatTokenizer, scoring: Scoring, extract: Extract
    ) -> None:
        self.backend, self.chat_tokenizer, self.scoring = backend, chat_tokenizer, scoring
        self._extract = extract
        self._scorer = path_scorer(scoring.rewards)

    async def run(self, request: GenerationRequest, timing: Timing) -> Selected:
        """Search; `timing` receives the seconds.

        Raises:
            APIError: a reward function cannot score a step, or a stop text is in the separator of steps.
            UserError: the backend cannot draw one.
        """
        assert request.search is not None
        try:
            waves = SearchWaves(
                self._scorer,
                self.chat_tokenizer.tokenizer,
                request.search,
                request.params,
                eos_token_ids=self.backend.eos_token_ids,
                extract=self._extract,
            )
        except UserError as error:
            raise refused(error, "search") from error
        columns = {name: [value] for name, value in request.columns.items()}
        calls = waves.calls([request.prompt], [request.prompt_ids], columns)
        answer: Any = None
        while True:
            call = await self.chat_tokenizer.workers.run(_next(calls, answer))
            if not isinstance(call, DrawSteps | ScorePaths):
                return call
            start = time.perf_counter()
            if isinstance(call, DrawSteps):
                answer = await self._draw(call, request, request.search)
                timing.generate_s += time.perf_counter() - start
            else:
                answer = await self._score(call)
                timing.score_s += time.perf_counter() - start

    async def _draw(self, call: DrawSteps, request: GenerationRequest, settings: SearchSettings) -> Any:
        logps = settings.prior == "logprob"
        params = replace(call.params, raw_logprobs=False)
        draws = (
            Draw(path, call.count, params, call.first, request.reproducible, logps) for path in call.paths
        )
        return await gather_all(self.backend.generate(draw) for draw in draws)

    async def _score(self, call: ScorePaths) -> PathScores:
        paths = call.paths
        found = await self.scoring.score(
            [path.prompt for path in paths],
            [as_completion(path.prompt, path.text) for path in paths],
            {name: [path.columns[name] for path in paths] for name in paths[0].columns},
        )
        known = [value for value in found.total if value is not None]
        if len(known) < len(paths):
            raise invalid_request(
                "no reward is applicable to a step of the search, all returned None; a search needs one that "
                "scores every step",
                "search",
            )
        return PathScores(known, 0, 0)


def _next(calls: StepCalls, answer: Any) -> Callable[[], DrawSteps | ScorePaths | Selected]:
    """Hands the answer over and gives the next call, or in the end what the only prompt's search selects."""

    def work() -> DrawSteps | ScorePaths | Selected:
        try:
            return calls.send(answer)
        except StopIteration as end:
            return end.value[0].selected

    return work
