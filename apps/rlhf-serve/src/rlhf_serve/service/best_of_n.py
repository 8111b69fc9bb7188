"""One request for candidates: generate, score, select."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_data import Message, Text, UserError
from rlhf_infer import (
    BestOfNSearch,
    Candidate,
    ConfidenceBasedStopping,
    OnToken,
    SamplingParams,
    SearchRules,
    Selected,
    Selection,
    extractor,
)
from rlhf_infer.async_loop import gathered
from rlhf_infer.sampling.candidates import VOTES
from rlhf_serve.backends.protocol import Backend, Draw
from rlhf_serve.service.scoring_queue import Scoring
from rlhf_serve.service.tokenization import Texts


@dataclass(frozen=True)
class Order:
    """What a request asks for, of one prompt.

    Args:
        prompt: what reward functions read: a text or messages.
        prompt_ids: what the policy reads.
        n: choices that come back.
        candidates: completions drawn; with `stopping` at most.
        stopping: ends drawing when the best is unlikely to be beaten; None draws all.
        selection: how choices are ranked.
        scored: whether candidates are scored.
        params: how candidates are drawn.
        reproducible: whether the same seed has to give the same candidates.
        logps: whether log-probs of their tokens are needed.
        columns: further values that reward functions read.
    """

    prompt: Text
    prompt_ids: tuple[int, ...]
    n: int
    candidates: int
    stopping: ConfidenceBasedStopping | None
    selection: Selection
    scored: bool
    params: SamplingParams
    reproducible: bool
    logps: bool
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Timing:
    """Seconds that parts of a request took; of several prompts the sums, and those of each."""

    queue_s: float = 0.0
    generate_s: float = 0.0
    score_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    prompts: list[Timing] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The seconds, and those since the request started."""
        found: dict[str, Any] = {"queue_s": round(self.queue_s, 4), **self._work()}
        found["total_s"] = round(time.perf_counter() - self.started, 4)
        return found | ({"prompts": [each._work() for each in self.prompts]} if self.prompts else {})

    def _work(self) -> dict[str, float]:
        return {"generate_s": round(self.generate_s, 4), "score_s": round(self.score_s, 4)}


@dataclass(frozen=True)
class Outcome:
    """The candidates of an order, their ranking, and what they cost."""

    order: Order
    selected: Selected

    @property
    def chosen(self) -> list[Candidate]:
        """The choices that come back."""
        return self.selected.top(self.order.n)


class BestOfNService:
    """Draws candidates, scores them, and ranks them.

    Args:
        backend: generates.
        texts: decodes.
        scoring: scores; None for a server without reward.
        messages: whether reward functions get conversations as messages.
        answer: what a majority counts, see `rlhf_infer.sampling.answers.extractor`.
    """

    def __init__(
        self,
        backend: Backend,
        texts: Texts,
        scoring: Scoring | None,
        *,
        messages: bool = True,
        answer: str = "text",
    ) -> None:
        self.backend, self.texts, self.scoring = backend, texts, scoring
        self.messages = messages
        self._extract = extractor(answer)

    def as_scored(self, messages: list[Message], template: Mapping[str, Any] | None = None) -> Text:
        """A conversation as reward functions read it: as messages, or as the text that the policy reads.

        Raises:
            APIError: the chat template refuses the messages.
        """
        return messages if self.messages else self.texts.rendered(messages, template)

    async def run(self, order: Order, timing: Timing, on_token: OnToken | None = None) -> Outcome:
        """Draw and rank the candidates of an order.

        Args:
            order: what is asked for.
            timing: gets the seconds.
            on_token: told of tokens as they come.

        Raises:
            APIError: a reward function cannot score one of them, or none of them has a score.
            UserError: the backend cannot draw them.
        """
        rules = SearchRules(
            order.candidates,
            order.params,
            self.texts.tokenizer,
            order.selection,
            self._extract if order.selection in VOTES else None,
            order.stopping,
        )
        search = BestOfNSearch(order.prompt, order.prompt_ids, rules)
        while count := search.next_samples():
            await self._draw(order, search, count, timing, on_token)
            if order.scored and self.scoring is not None:
                await self._score(self.scoring, search, order, timing)
        try:
            return Outcome(order, search.selected())
        except UserError as error:
            assert self.scoring is not None
            raise self.scoring.nothing_scored(str(error)) from error

    async def run_all(self, orders: Sequence[Order], timing: Timing) -> list[Outcome]:
        """The outcomes of several orders, worked on at the same time."""
        timings = [Timing() for _ in orders]
        found = await gathered(self.run(o, t) for o, t in zip(orders, timings, strict=True))
        timing.generate_s += sum(each.generate_s for each in timings)
        timing.score_s += sum(each.score_s for each in timings)
        timing.prompts = timings if len(timings) > 1 else []
        return found

    async def _draw(
        self, order: Order, search: BestOfNSearch, count: int, timing: Timing, on_token: OnToken | None
    ) -> None:
        start = time.perf_counter()
        first = len(search.candidates)
        draw = Draw(order.prompt_ids, count, order.params, first, order.reproducible, order.logps)
        search.add(await self.backend.generate(draw, on_token))
        timing.generate_s += time.perf_counter() - start

    async def _score(self, scoring: Scoring, search: BestOfNSearch, order: Order, timing: Timing) -> None:
        """Score what has no score yet; repeats have theirs already."""
        if not (new := search.unscored()):
            return
        start = time.perf_counter()
        found = await scoring.score(
            [search.prompt] * len(new),
            [search.completion(each) for each in new],
            {name: [value] * len(new) for name, value in order.columns.items()},
        )
        timing.score_s += time.perf_counter() - start
        search.give_scores(new, found.total, found.by_name)

    async def close(self) -> None:
        """Give up what is running."""
        await self.backend.close()
        if self.scoring is not None:
            await asyncio.to_thread(self.scoring.close)
        self.texts.workers.close()
