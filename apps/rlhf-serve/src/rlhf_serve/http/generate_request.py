"""A request for candidates from its place in the queue to its last byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from rlhf_data import UserError
from rlhf_infer import TopLogps
from rlhf_serve.errors import APIError, engine_dead, internal_error, refused
from rlhf_serve.http.error_handlers import log_cause
from rlhf_serve.http.limits import Admission
from rlhf_serve.http.streaming import with_pauses, within
from rlhf_serve.http.telemetry import RequestRecord
from rlhf_serve.openai.logprobs import CompletionStream
from rlhf_serve.openai.parse_request import check_constraint
from rlhf_serve.openai.responses import WAITING, Format
from rlhf_serve.openai.responses_api import ResponseFormat
from rlhf_serve.service.best_of_n import BestOfNService, GenerationResult
from rlhf_serve.service.requests import GenerationRequest, Timing

PAUSE_S = 5.0
"""Seconds of silence after which a stream sends a sign of life."""

Remember = Callable[[str, str | None, Sequence[GenerationResult]], None]
"""Takes an answer's id, the name of the API key, and what it holds."""


class GenerationJob:
    """One request for candidates, from its place in the queue to its last byte.

    Bodies are parsed in a thread, because a chat template may take any time. `timeout_s` counts from when the
    request came.
    """

    def __init__(
        self,
        service: BestOfNService,
        parse_requests: Callable[[], Sequence[GenerationRequest]],
        style: Format | ResponseFormat,
        record: RequestRecord,
        timeout_s: float,
        *,
        log_prompts: bool = False,
        remember: Remember | None = None,
    ) -> None:
        self.service, self.style, self.record = service, style, record
        self.requests: Sequence[GenerationRequest] = ()
        self.timing = Timing(started=record.began)
        self._head: Any = None
        self._remember = remember
        self._parse_requests, self._timeout_s, self._log_prompts = parse_requests, timeout_s, log_prompts

    @asynccontextmanager
    async def _placed(self, admission: Admission) -> AsyncIterator[None]:
        """Wait for a place in the queue, parse the requests, and hold the place while the context lasts.

        Raises:
            APIError: 400, the request is wrong; 429, the queue is full; 503, the engine has stopped; 504, the
                request took too long.
        """
        async with within(self._timeout_s, self.record.began), admission.enter() as waited:
            self.timing.queue_s = self.record.queue_s = waited
            try:
                if self.service.backend.dead:
                    raise engine_dead()
                chat_tokenizer = self.service.chat_tokenizer
                self.requests = await chat_tokenizer.workers.run(self._parse_requests)
                constraint = self.requests[0].params.constraint
                if constraint is not None:
                    await chat_tokenizer.compilers.run(
                        partial(check_constraint, constraint, self.service.backend)
                    )
                if self._log_prompts:
                    self.record.prompt = chat_tokenizer.decode(self.requests[0].prompt_ids)
                yield
            except UserError as error:
                raise refused(error) from error
            except Exception as error:
                if self.service.backend.dead:
                    raise engine_dead() from error
                raise

    async def whole(self, admission: Admission) -> dict[str, Any]:
        """The response at once.

        Raises:
            APIError: as `_placed`; a candidate cannot be drawn or scored.
        """
        async with self._placed(admission):
            results = await self.service.run_all(self.requests, self.timing)
        response = self.style.whole(results, self.timing)
        self._note(results, response["id"])
        return response

    async def events(self, admission: Admission, with_usage: bool) -> AsyncGenerator[str, None]:
        """The response as events: a single candidate is streamed by token, winners once they are known.

        Raises:
            APIError: as `whole`, before the first event; later ones come as events.
        """
        queue: asyncio.Queue[str | APIError | None] = asyncio.Queue()
        work = asyncio.ensure_future(self._fill(queue, admission, with_usage))
        begun = False
        try:
            async for item in with_pauses(queue, PAUSE_S, WAITING):
                if isinstance(item, APIError):
                    if not begun:
                        raise item
                    self.record.error = item.code
                    log_cause(item, self.record.id)
                    item = self.style.error(self._head, item)
                if item:
                    begun = True
                    yield item
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _fill(
        self, queue: asyncio.Queue[str | APIError | None], admission: Admission, with_usage: bool
    ) -> None:
        """Put events into the queue, and an error or None after the last."""
        try:
            async with self._placed(admission):
                await self._stream(queue, with_usage)
        except APIError as error:
            queue.put_nowait(error)
        except Exception as error:  # the response may have begun: this is the only place to report it
            failed = internal_error(self.record.id)
            failed.__cause__ = error
            queue.put_nowait(failed)
        queue.put_nowait(None)

    async def _stream(self, queue: asyncio.Queue[str | APIError | None], with_usage: bool) -> None:
        head: Any = self.style.stream_head()
        self._head = head
        [first, *others] = self.requests
        if not others and first.candidates == 1 and first.search is None:
            results = [await self._live(first, head, queue)]
        else:
            results = await self.service.run_all(self.requests, self.timing)
            for text in self.style.chunks(head, results):
                queue.put_nowait(text)
        self._note(results, self.style.id_of(head))
        queue.put_nowait(self.style.ending(head, results, self.timing, with_usage=with_usage))

    async def _live(
        self, request: GenerationRequest, head: Any, queue: asyncio.Queue[str | APIError | None]
    ) -> GenerationResult:
        """A single candidate, streamed by token."""
        stream = CompletionStream(self.service.chat_tokenizer, request.params, self.style.before(request))
        choice = self.style.choice(head, 0)

        def on_token(sample: int, token: int, logp: float, top: TopLogps) -> None:
            del sample
            if piece := stream.add(token, logp, top):
                queue.put_nowait(choice.piece(piece))

        queue.put_nowait(choice.opening())
        result = await self.service.run(request, self.timing, on_token)
        await asyncio.sleep(0)  # so that tokens handed over are reported first
        if rest := stream.rest():
            queue.put_nowait(choice.piece(rest))
        queue.put_nowait(choice.closing(result.selected.candidates[0]))
        return result

    def _note(self, results: Sequence[GenerationResult], answer: str) -> None:
        """Enter the results in the log record, and among the answers that can be rated."""
        if self._remember is not None:
            self._remember(answer, self.record.key, results)
        record, drawn = self.record, [each for result in results for each in result.selected.candidates]
        chosen = [each for result in results for each in result.chosen]
        record.prompt_tokens = sum(result.selected.cost.prompt_tokens for result in results)
        record.completion_tokens = sum(len(each.rollout.completion_ids) for each in chosen)
        record.candidate_tokens = sum(result.selected.cost.completion_tokens for result in results)
        record.candidates = len(drawn)
        record.saved_candidates = sum(result.selected.cost.saved_samples for result in results)
        record.generate_s, record.score_s = self.timing.generate_s, self.timing.score_s
        record.rewards = [each.score for each in drawn if each.score is not None]
        record.selected_rewards = [each.score for each in chosen if each.score is not None]
