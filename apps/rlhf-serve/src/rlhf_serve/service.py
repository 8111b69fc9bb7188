"""One request for candidates: generate, score, select."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_data.transcripts import Text
from rlhf_infer import SamplingParams
from rlhf_infer.answers import extractor
from rlhf_infer.candidates import Candidate, select
from rlhf_infer.continuous import OnToken
from rlhf_infer.stopping import ConfidenceBasedStopping
from rlhf_serve.backends import Backend, Draw
from rlhf_serve.schema import Selection
from rlhf_serve.scoring import ScoringQueue
from rlhf_serve.texts import Texts


@dataclass(frozen=True)
class Order:
    """What a request asks for, of one prompt.

    Args:
        prompt: what reward functions read: a text or messages.
        prompt_ids: what the policy reads.
        n: choices that come back.
        candidates: completions drawn; with `adaptive` at most.
        adaptive: whether drawing ends when the best is unlikely to be beaten.
        selection: how choices are ranked.
        scored: whether candidates are scored.
        params: how candidates are drawn.
        reproducible: whether the same seed has to give the same candidates.
        logps: whether log-probs of their tokens are needed.
    """

    prompt: Text
    prompt_ids: tuple[int, ...]
    n: int
    candidates: int
    adaptive: bool
    selection: Selection
    scored: bool
    params: SamplingParams
    reproducible: bool
    logps: bool


@dataclass
class Timing:
    """Seconds that parts of a request took."""

    queue_s: float = 0.0
    generate_s: float = 0.0
    score_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def to_dict(self) -> dict[str, float]:
        """The seconds, and those since the request started."""
        total = time.perf_counter() - self.started
        parts = {"queue_s": self.queue_s, "generate_s": self.generate_s, "score_s": self.score_s}
        return {name: round(value, 4) for name, value in (parts | {"total_s": total}).items()}


@dataclass(frozen=True)
class Outcome:
    """The candidates of an order, and their places best first."""

    order: Order
    candidates: list[Candidate]
    ranking: tuple[int, ...]

    @property
    def chosen(self) -> list[Candidate]:
        """The choices that come back."""
        return [self.candidates[place] for place in self.ranking[: self.order.n]]

    @property
    def tokens(self) -> int:
        """Tokens of all candidates."""
        return sum(len(each.rollout.completion_ids) for each in self.candidates)


class BestOfNService:
    """Draws candidates, scores them, and ranks them.

    Args:
        backend: generates.
        texts: decodes.
        scoring: scores; None for a server without reward.
        messages: whether reward functions get conversations as messages.
        answer: what a majority counts, see `rlhf_infer.answers.extractor`.
    """

    def __init__(
        self,
        backend: Backend,
        texts: Texts,
        scoring: ScoringQueue | None,
        *,
        messages: bool = True,
        answer: str = "text",
    ) -> None:
        self.backend, self.texts, self.scoring = backend, texts, scoring
        self.messages = messages
        self._extract = extractor(answer)

    async def run(self, order: Order, timing: Timing, on_token: OnToken | None = None) -> Outcome:
        """Draw and rank the candidates of an order.

        Args:
            order: what is asked for.
            timing: gets the seconds.
            on_token: told of tokens as they come.

        Raises:
            UserError: a reward function cannot score one of them, or the backend cannot draw them.
        """
        stopping = ConfidenceBasedStopping(
            min_samples=min(4, order.candidates),
            max_samples=order.candidates,
            probability=0.1 if order.adaptive else 0.0,
        )
        found: list[Candidate] = []
        while True:
            count = order.candidates
            if order.adaptive:
                count = stopping.next_samples([c.score for c in found], [c.confidence for c in found])
            if (found and not order.adaptive) or not count:
                break
            found += await self._draw(order, len(found), count, timing, on_token)
        if order.selection == "none":
            return Outcome(order, found, tuple(range(len(found))))
        return Outcome(order, found, select(found, order.selection, extract=self._extract))

    async def run_all(self, orders: Sequence[Order], timing: Timing) -> list[Outcome]:
        """The outcomes of several orders, worked on at the same time."""
        tasks = [asyncio.ensure_future(self.run(order, timing)) for order in orders]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _draw(
        self, order: Order, first: int, count: int, timing: Timing, on_token: OnToken | None
    ) -> list[Candidate]:
        start = time.perf_counter()
        draw = Draw(order.prompt_ids, count, order.params, first, order.reproducible, order.logps)
        rollouts = await self.backend.generate(draw, on_token)
        timing.generate_s += time.perf_counter() - start
        texts = [self.texts.completion(each.completion_ids, order.params.stop) for each in rollouts]
        answers = [self._extract(text) if order.selection == "majority" else None for text in texts]
        totals: list[float | None] = [None] * count
        by_sample: list[dict[str, float]] = [{} for _ in range(count)]
        if order.scored and self.scoring is not None:
            start = time.perf_counter()
            completions: list[Text] = list(texts)
            if not isinstance(order.prompt, str):
                completions = [[{"role": "assistant", "content": text}] for text in texts]
            scores = await self.scoring.score(
                [order.prompt] * count, completions, [each.completion_ids for each in rollouts]
            )
            timing.score_s += time.perf_counter() - start
            totals = list(scores.total)
            by_sample = [
                {name: value for name, row in scores.by_name.items() if (value := row[i]) is not None}
                for i in range(count)
            ]
        return [
            Candidate(first + i, texts[i], rollouts[i], totals[i], by_sample[i], answers[i])
            for i in range(count)
        ]

    async def close(self) -> None:
        """Give up what is running."""
        await self.backend.close()
        if self.scoring is not None:
            await asyncio.to_thread(self.scoring.close)


def scores_of(candidate: Candidate) -> dict[str, Any]:
    """The score and the scores of a candidate, for a response."""
    return {"score": candidate.score, "scores": dict(candidate.scores)}
