"""A request for candidates from its place in the queue to its last byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rlhf_data import UserError
from rlhf_infer import TopLogps
from rlhf_serve.errors import APIError, internal_error, invalid_request
from rlhf_serve.http.error_handlers import log_cause
from rlhf_serve.http.limits import Admission
from rlhf_serve.http.streaming import with_pauses, within
from rlhf_serve.http.telemetry import RequestRecord
from rlhf_serve.openai.logprobs import Unfolding
from rlhf_serve.openai.responses import WAITING, Format, event
from rlhf_serve.service.best_of_n import BestOfNService, Order, Outcome, Timing

PAUSE_S = 5.0
"""Seconds after which a stream shows that it lives."""


class Generating:
    """One request for candidates, from its place in the queue to its last byte.

    Args:
        service: draws and scores.
        make_orders: reads the request, one order per prompt; done in a thread, for a chat template may take
            any time.
        style: how it is answered.
        record: what is told of the request.
        timeout_s: seconds after its coming at which it is given up.
        log_prompts: whether the record gets the prompt.
    """

    def __init__(
        self,
        service: BestOfNService,
        make_orders: Callable[[], Sequence[Order]],
        style: Format,
        record: RequestRecord,
        timeout_s: float,
        *,
        log_prompts: bool = False,
    ) -> None:
        self.service, self.style, self.record = service, style, record
        self.orders: Sequence[Order] = ()
        self.timing = Timing(started=record.began)
        self._make_orders, self._timeout_s, self._log_prompts = make_orders, timeout_s, log_prompts

    @asynccontextmanager
    async def _placed(self, door: Admission) -> AsyncIterator[None]:
        """Wait for a place in the queue and have it for as long as the context lasts, the orders being read.

        Raises:
            APIError: 400, the request is wrong; 429, the queue is full; 504, the
                request took too long.
        """
        async with within(self._timeout_s, self.record.began), door.enter() as waited:
            self.timing.queue_s = self.record.queue_s = waited
            try:
                self.orders = await self.service.texts.workers.run(self._make_orders)
                if self._log_prompts:
                    self.record.prompt = self.service.texts.decode(self.orders[0].prompt_ids)
                yield
            except UserError as error:
                raise invalid_request(str(error)) from error

    async def whole(self, door: Admission) -> dict[str, Any]:
        """The response at once.

        Raises:
            APIError: as `_placed`; a candidate cannot be drawn or scored.
        """
        async with self._placed(door):
            outcomes = await self.service.run_all(self.orders, self.timing)
        self._note(outcomes)
        return self.style.whole(outcomes, self.timing)

    async def events(self, door: Admission, with_usage: bool) -> AsyncGenerator[str, None]:
        """The response as events: a single candidate token by token as it comes, winners once they are known.

        Args:
            door: the queue.
            with_usage: whether the last event tells the usage.

        Raises:
            APIError: as `whole`, before the first event; later ones come as events.
        """
        queue: asyncio.Queue[str | APIError | None] = asyncio.Queue()
        work = asyncio.ensure_future(self._fill(queue, door, with_usage))
        begun = False
        try:
            async for item in with_pauses(queue, PAUSE_S, WAITING):
                if isinstance(item, APIError):
                    if not begun:
                        raise item
                    self.record.error = item.code
                    log_cause(item, self.record.id)
                    item = event(item.body())
                begun = True
                yield item
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _fill(
        self, queue: asyncio.Queue[str | APIError | None], door: Admission, with_usage: bool
    ) -> None:
        """Put events into the queue, and an error or None behind the last."""
        try:
            async with self._placed(door):
                await self._stream(queue, with_usage)
        except APIError as error:
            queue.put_nowait(error)
        except Exception as error:  # the response may have begun: its reader is told here or never
            failed = internal_error(self.record.id)
            failed.__cause__ = error
            queue.put_nowait(failed)
        queue.put_nowait(None)

    async def _stream(self, queue: asyncio.Queue[str | APIError | None], with_usage: bool) -> None:
        head = self.style.stream_head()
        [first, *others] = self.orders
        if not others and first.candidates == 1:
            outcomes = [await self._live(first, head, queue)]
        else:
            outcomes = await self.service.run_all(self.orders, self.timing)
            for text in self.style.chunks(head, outcomes):
                queue.put_nowait(text)
        self._note(outcomes)
        queue.put_nowait(self.style.ending(head, outcomes, self.timing, with_usage=with_usage))

    async def _live(
        self, order: Order, head: dict[str, Any], queue: asyncio.Queue[str | APIError | None]
    ) -> Outcome:
        """A single candidate, token by token as it comes."""
        unfolding = Unfolding(self.service.texts, order.params)

        def on_token(sample: int, token: int, logp: float, top: TopLogps) -> None:
            del sample
            if piece := unfolding.add(token, logp, top):
                queue.put_nowait(self.style.piece(head, 0, piece))

        if opening := self.style.opening(head, 0):
            queue.put_nowait(opening)
        outcome = await self.service.run(order, self.timing, on_token)
        await asyncio.sleep(0)  # tokens that were handed over are told first
        if rest := unfolding.rest():
            queue.put_nowait(self.style.piece(head, 0, rest))
        queue.put_nowait(self.style.closing(head, 0, outcome.selected.candidates[0]))
        return outcome

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        """Tell the record what became of the request."""
        record, drawn = self.record, [each for outcome in outcomes for each in outcome.selected.candidates]
        chosen = [each for outcome in outcomes for each in outcome.chosen]
        record.prompt_tokens = sum(outcome.selected.cost.prompt_tokens for outcome in outcomes)
        record.completion_tokens = sum(len(each.rollout.completion_ids) for each in chosen)
        record.candidate_tokens = sum(outcome.selected.cost.completion_tokens for outcome in outcomes)
        record.candidates = len(drawn)
        record.saved_candidates = sum(outcome.selected.cost.saved_samples for outcome in outcomes)
        record.generate_s, record.score_s = self.timing.generate_s, self.timing.score_s
        record.rewards = [each.score for each in drawn if each.score is not None]
        record.selected_rewards = [each.score for each in chosen if each.score is not None]
