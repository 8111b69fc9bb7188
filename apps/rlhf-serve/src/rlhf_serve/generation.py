"""A request for candidates from its place in the queue to its last byte."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rlhf_data import UserError
from rlhf_serve.clients import with_pauses
from rlhf_serve.errors import APIError, internal_error, invalid_request, timed_out
from rlhf_serve.limits import Admission
from rlhf_serve.observe import RequestRecord
from rlhf_serve.responses import WAITING, Format, event
from rlhf_serve.service import BestOfNService, Order, Outcome, Timing
from rlhf_serve.texts import GrowingText

logger = logging.getLogger("rlhf_serve")

_PAUSE_S = 10.0
"""Seconds after which a stream shows that it lives."""


class Generating:
    """One request for candidates.

    Args:
        service: draws and scores.
        orders: one per prompt.
        style: how it is answered.
    """

    def __init__(self, service: BestOfNService, orders: Sequence[Order], style: Format) -> None:
        self.service, self.orders, self.style = service, orders, style
        self.timing = Timing()
        self.record = RequestRecord()

    @asynccontextmanager
    async def placed(self, door: Admission) -> AsyncIterator[None]:
        """Wait for a place in the queue, and have it for as long as the context lasts.

        Raises:
            APIError: 429, the queue is full; 503, the server drains.
        """
        async with door.enter() as waited:
            self.timing.queue_s = self.record.queue_s = waited
            yield

    async def whole(self) -> dict[str, Any]:
        """The response at once.

        Raises:
            APIError: a candidate cannot be drawn or scored.
        """
        try:
            outcomes = await self.service.run_all(self.orders, self.timing)
        except UserError as error:
            raise invalid_request(str(error)) from error
        self._note(outcomes)
        return self.style.whole(outcomes, self.timing)

    async def events(self, timeout_s: float, with_usage: bool) -> AsyncIterator[str]:
        """The response as events: a single candidate token by token as it comes, winners once they are known.

        An error comes as an event, for the response has begun.

        Args:
            timeout_s: seconds after which the request is given up.
            with_usage: whether the last event tells the usage.
        """
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        work = asyncio.ensure_future(self._fill(queue, timeout_s, with_usage))
        try:
            async for text in with_pauses(queue, _PAUSE_S, WAITING):
                yield text
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _fill(self, queue: asyncio.Queue[str | None], timeout_s: float, with_usage: bool) -> None:
        """Put events into the queue, and None behind the last."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream(queue, with_usage)
        except APIError as error:
            self._fail(queue, error)
        except UserError as error:
            self._fail(queue, invalid_request(str(error)))
        except TimeoutError:
            self._fail(queue, timed_out(timeout_s))
        except Exception:  # the response has begun: its reader is told here or never
            logger.exception("request %s failed", self.record.id)
            self._fail(queue, internal_error(self.record.id))
        queue.put_nowait(None)

    async def _stream(self, queue: asyncio.Queue[str | None], with_usage: bool) -> None:
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

    async def _live(self, order: Order, head: dict[str, Any], queue: asyncio.Queue[str | None]) -> Outcome:
        """A single candidate, token by token as it comes."""
        growing = GrowingText(self.service.texts, order.params.stop, order.params.min_new_tokens)

        def on_token(sample: int, token: int) -> None:
            del sample
            if piece := growing.add(token):
                queue.put_nowait(self.style.piece(head, 0, piece))

        if opening := self.style.opening(head, 0):
            queue.put_nowait(opening)
        outcome = await self.service.run(order, self.timing, on_token)
        await asyncio.sleep(0)  # tokens that were handed over are told first
        if rest := growing.rest():
            queue.put_nowait(self.style.piece(head, 0, rest))
        queue.put_nowait(self.style.closing(head, 0, outcome.candidates[0]))
        return outcome

    def _fail(self, queue: asyncio.Queue[str | None], error: APIError) -> None:
        self.record.error = error.code
        queue.put_nowait(event(error.body()))

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        """Tell the record what became of the request."""
        record, drawn = self.record, [each for outcome in outcomes for each in outcome.candidates]
        chosen = [each for outcome in outcomes for each in outcome.chosen]
        record.prompt_tokens = sum(outcome.cost.prompt_tokens for outcome in outcomes)
        record.completion_tokens = sum(len(each.rollout.completion_ids) for each in chosen)
        record.candidate_tokens = sum(outcome.cost.completion_tokens for outcome in outcomes)
        record.candidates = len(drawn)
        record.saved_candidates = sum(outcome.cost.saved_samples for outcome in outcomes)
        record.generate_s, record.score_s = self.timing.generate_s, self.timing.score_s
        record.rewards = [each.score for each in drawn if each.score is not None]
        record.selected_rewards = [each.score for each in chosen if each.score is not None]
