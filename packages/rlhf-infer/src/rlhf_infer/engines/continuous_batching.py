"""Requests that come and go while others are being generated, with transformers models."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from rlhf_infer.engines.batched_requests import (
    OnToken,
    Order,
    Piece,
    Running,
    fail,
    size_of,
)
from rlhf_infer.engines.prefill import within_window
from rlhf_infer.engines.protocol import Rollout, SamplingParams, check_bias
from rlhf_infer.engines.speculative_batch import JoinedCohort, joinable
from rlhf_infer.engines.transformers_engine import TransformersEngine
from rlhf_infer.kv.decode_attention import BLOCK
from rlhf_models import evaluating

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_APART = 4
"""Cohorts of one kind that are decoded apart; joining copies their keys and values."""

ROW_SIZES = (*range(1, 9), *range(16, 65, 8), *range(96, 257, 32), *range(320, 1025, 64))
"""Numbers of rows that a forward pass is padded to; few, because each new shape takes memory for good."""


class ContinuousBatcher:
    """Generates for many callers at a time: a pass decodes all running requests, others join at any token.

    Requests that began at different times and have the same settings, but for seed and length, are decoded as
    one batch once there are more than a few.

    A request's samples are those of `TransformersEngine.generate` with the same arguments, up to rounding: a
    token may differ where two are equally likely.

    Keys and values never take more than the engine's `max_batch_tokens`, counted in the blocks that rows
    fill: no memory is reserved for a completion's longest length. Requests start in the order in which they
    came, as soon as every row could fill one more block; where rows turn out to need more than there is, the
    youngest requests give up their keys and values, and continue later with the same tokens (the preemption
    by recomputation of Kwon et al. 2023, arXiv:2309.06180). A request with more samples than fit at once at
    their longest is drawn in pieces, so that the oldest can always finish. A separate thread does the work;
    nothing else may use the model.

    While others are generated, a long prompt is computed in chunks, one before each of their tokens (chunked
    prefill, Agrawal et al. 2023, arXiv:2308.16369), as far as the engine's `prefix_cache_tokens` hold them.

    Args:
        engine: its model stays in eval mode.
        chunk_tokens: prompt tokens that are computed between two tokens of others; None for whole prompts.
        threads: CPU threads of the batcher's thread; None for what torch takes.
        after_tokens: called in the batcher's thread once all followers have received a step's tokens.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        *,
        chunk_tokens: int | None = None,
        threads: int | None = None,
        after_tokens: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self._chunk_tokens = math.inf if chunk_tokens is None else chunk_tokens
        self._threads, self._after_tokens = threads, after_tokens
        self._waiting: deque[Piece] = deque()
        self._work: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running: list[Running] = []
        self._paused: list[Running] = []
        self.preemptions = 0
        """How many times requests have given up their keys and values, so far."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rlhf-generation", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
        *,
        first: int = 0,
        on_token: OnToken | None = None,
    ) -> Future[list[Rollout]]:
        """Ask for `n` samples of a prompt.

        Args:
            prompt: token ids.
            n: samples, at least 1.
            params: how they are drawn.
            first: index of the first sample.
            on_token: called from the batcher's thread; it must be quick.

        Returns:
            The rollouts, as soon as all have finished. Cancelling it ends the samples at the next token.

        Raises:
            ValueError: `n` is below 1.
            UserError: the prompt is empty or, with a completion, longer than the model's context or the
                engine's `max_batch_tokens`.
            RuntimeError: the batcher is closed.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        self.engine.check_lengths([prompt], params.max_new_tokens)
        check_bias(params, self.engine.vocab_size)
        ids, order = tuple(map(int, prompt)), Order(range(first, first + n))
        pieces = [
            Piece(ids, samples, params, on_token, order)
            for samples in self.engine.pieces(1, len(ids), order.samples, params.max_new_tokens)
        ]
        with self._changed:
            if self._closed:
                raise RuntimeError("the batcher is closed")
            self._waiting.extend(pieces)
            self._changed.notify()
        return order.result

    def submit_work(self, work: Callable[[], T]) -> Future[T]:
        """Have other work done in the batcher's thread, between two tokens; what `work` raises fails it.

        On CPUs two threads that each compute on many cores compete for them: work is done sooner between two
        tokens than beside the generation.

        Raises:
            RuntimeError: the batcher is closed.
        """
        result: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the batcher is closed")
            self._work.append((work, result))
            self._changed.notify()
        return result

    @property
    def running(self) -> int:
        """Number of requests that are being generated, paused ones included."""
        pieces = [piece for each in self._begun for piece in each.pieces if piece is not None]
        return len({id(piece.order) for piece in pieces})

    @property
    def held_tokens(self) -> int:
        """Tokens whose keys and values are held, blocks that are begun counted whole."""
        return sum(each.cohort.needed_tokens(0) for each in tuple(self._running))

    @property
    def paused(self) -> int:
        """Cohorts of requests that wait for memory in the middle of their completions."""
        return len(self._paused)

    def close(self) -> None:
        """Fail what is not finished, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with evaluating(self.engine.model):
            while self._wait():
                self._do_work()
                try:
                    self._admit()
                    self._step()
                except Exception as error:  # the one who waits gets it; others may still be served
                    _LOG.exception("generation failed")
                    self._give_up(error)
        with self._changed:
            self._give_up(RuntimeError("the batcher was closed"))

    @property
    def _begun(self) -> list[Running]:
        """Running requests and, younger than all of them, paused ones; the oldest first."""
        return [*self._running, *self._paused]

    def _wait(self) -> bool:
        """Wait until there is something to do; False when the batcher is closed."""
        with self._changed:
            while not (self._closed or self._waiting or self._begun or self._work):
                self._changed.wait()
            return not self._closed

    def _do_work(self) -> None:
        """Do one piece of the work that `submit_work` got, before each token."""
        if not self._work:
            return
        work, result = self._work.popleft()
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    def _admit(self) -> None:
        """Resume what is paused, then start the pieces that fit, neighbours of one kind in one cohort."""
        self._go_on()
        left = self._chunk_tokens if self._running else math.inf
        left -= self._compute_ahead(left)
        while left > 0 and not self._paused and (batch := self._next_batch(left)):
            left -= sum(self.engine.rest(piece.prompt) for piece in batch)
            samples, params = batch[0].kind
            try:
                cohort = self.engine.start(
                    [piece.prompt for piece in batch],
                    samples,
                    params,
                    seeds=[piece.params.seed for piece in batch],
                )
            except Exception as error:
                _LOG.exception("a prompt could not be computed")
                fail(batch, error)
                continue
            self._running.append(Running(cohort, list(batch)))

    def _go_on(self) -> None:
        """Resume paused requests, the oldest first, as far as they fit."""
        while self._paused and self._fits(self._paused[0].cohort.needed_tokens(BLOCK)):
            each = self._paused.pop(0)
            try:
                self.engine.resume(each.cohort)
            except Exception as error:
                _LOG.exception("a prompt could not be computed again")
                fail(each.pieces, error)
                continue
            self._running.append(each)

    def _compute_ahead(self, most: float) -> int:
        """Compute at most that many tokens of the next piece's prompt if it has more; how many they were."""
        if most == math.inf or self._paused or not self._waiting:
            return 0
        piece = self._waiting[0]
        if piece.order.result.done() or not self._fits(size_of([piece], BLOCK)):
            return 0
        try:
            return self.engine.compute_ahead(piece.prompt, int(most))
        except Exception as error:
            _LOG.exception("a prompt could not be computed")
            piece.order.fail(error)
            return 0

    def _next_batch(self, most: float) -> list[Piece]:
        """The pieces at the head of the queue that can start together now.

        At most `most` tokens of theirs are computed, or those of one alone where that is a whole chunk.
        """
        batch: list[Piece] = []
        if not self._waiting:  # as before nearly every token
            return batch
        with self._changed:
            while self._waiting:
                piece = self._waiting[0]
                if piece.order.result.done():  # cancelled, or another piece of it failed
                    self._waiting.popleft()
                    continue
                if batch and piece.kind != batch[0].kind:
                    break
                more = [*batch, piece]
                # Alone it must fit at its longest, for the oldest cohort never has to pause.
                if size_of(more, piece.params.max_new_tokens) > self.engine.max_batch_tokens:
                    break
                if not self._fits(size_of(more, BLOCK)):
                    break
                rest = self.engine.rest(piece.prompt)
                if rest > most and (batch or most < self._chunk_tokens):
                    break
                most -= rest
                batch.append(self._waiting.popleft())
        return batch

    def _fits(self, tokens: int) -> bool:
        """Whether `tokens` fit while every running row fills one more block; always if nothing runs."""
        held = sum(each.cohort.needed_tokens(BLOCK) for each in self._running)
        return not held or held + tokens <= self.engine.max_batch_tokens

    def _make_room(self) -> None:
        """Pause the youngest requests until the next token of the others fits."""
        while (
            len(self._running) > 1
            and sum(each.cohort.needed_tokens() for each in self._running) > self.engine.max_batch_tokens
        ):
            youngest = self._running.pop()
            youngest.cohort.forget()
            self._paused.insert(0, youngest)
            self.preemptions += 1

    def _step(self) -> None:
        """Drop cancelled requests, decode one token of all others, answer those that have finished."""
        for each in self._begun:
            for prompt, piece in enumerate(each.pieces):
                if piece is not None and piece.order.result.done():
                    each.cohort.cancel(prompt)
                    each.pieces[prompt] = None
        self._running = [each for each in self._running if not each.cohort.finished]
        self._paused = [each for each in self._paused if not each.cohort.finished]
        if not self._running:
            return
        self._make_room()
        self._join()
        before = [each.cohort.rows.finished for each in self._running]
        followed = [(each, each.lengths()) for each in self._running if each.is_followed]
        self.engine.advance([each.cohort for each in self._running], row_sizes=ROW_SIZES)
        for each, lengths in followed:
            each.tell(lengths)
        if followed and self._after_tokens is not None:
            self._after_tokens()
        for each, finished in zip(self._running, before, strict=True):
            if each.cohort.rows.finished != finished:
                self._answer(each)
        self._running = [each for each in self._running if not each.cohort.finished]

    def _join(self) -> None:
        """Merge cohorts of one kind once there are many: attention runs once per cohort and layer."""
        if len(self._running) <= _APART:
            return
        kinds: list[list[Running]] = []
        for each in filter(self._can_join, self._running):
            alike = next((kind for kind in kinds if kind[0].kind == each.kind), None)
            if alike is None:
                kinds.append(alike := [])
            alike.append(each)
        for kind in kinds:
            for group in self._groups(kind) if len(kind) > _APART else ():
                if self._joined_size(group) > self.engine.max_batch_tokens:
                    continue
                pieces: list[Piece | None] = [piece for each in group for piece in each.waited_for]
                place = min(map(self._running.index, group))
                self._running[place] = Running(JoinedCohort([each.cohort for each in group]), pieces)
                self._running = [each for each in self._running if each not in group]

    def _joined_size(self, group: list[Running]) -> int:
        """Tokens held by all running cohorts once a group of them is one, padded to one length."""
        apart = sum(each.cohort.needed_tokens() for each in self._running if each not in group)
        pieces = [piece for each in group for piece in each.waited_for]
        return apart + size_of(pieces, 1 + max(each.cohort.rows.longest for each in group))

    def _can_join(self, each: Running) -> bool:
        longest = max(len(piece.prompt) + piece.params.max_new_tokens for piece in each.waited_for)
        return joinable(each.cohort) and within_window(self.engine.model, longest)

    def _groups(self, kind: list[Running]) -> list[list[Running]]:
        """Cohorts to merge: they fit `max_batch_tokens` at full length, and at most half is padding."""
        groups: list[list[Running]] = []
        for each in sorted(kind, key=lambda one: one.cohort.needed_tokens()):
            if groups and self._fit_together([*groups[-1], each]):
                groups[-1].append(each)
            else:
                groups.append([each])
        return [group for group in groups if len(group) > 1]

    def _fit_together(self, group: list[Running]) -> bool:
        pieces = [piece for each in group for piece in each.waited_for]
        most = max(piece.params.max_new_tokens for piece in pieces)
        if size_of(pieces, most) > self.engine.max_batch_tokens:
            return False
        newest = max(each.cohort.rows.longest for each in group)
        return size_of(pieces, newest + 1) <= 2 * sum(each.cohort.needed_tokens() for each in group)

    @staticmethod
    def _answer(each: Running) -> None:
        """Hand over the completions of the pieces whose samples have all finished."""
        unfinished = set(each.cohort.rows.prompt[each.cohort.rows.alive].tolist())
        for prompt, piece in enumerate(each.pieces):
            if piece is not None and prompt not in unfinished:
                each.pieces[prompt] = None
                piece.order.take(piece.samples, each.cohort.rows.rollouts_of(prompt))

    def _give_up(self, error: Exception) -> None:
        """Fail all running requests; paused and waiting ones too once the batcher is closed."""
        running, self._running = self._running, []
        if self._closed:
            running += self._paused
        waiting = list(self._waiting) if self._closed else []
        for _, result in self._work if self._closed else ():
            if result.set_running_or_notify_cancel():
                result.set_exception(error)
        fail([*(piece for each in running for piece in each.pieces), *waiting], error)
