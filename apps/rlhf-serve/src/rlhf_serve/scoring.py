"""Scores for many requests at a time, while others are being generated."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_data.transcripts import Text
from rlhf_infer import RewardFunctions

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """What reward functions say of some completions.

    Args:
        total: weighted sum of each completion.
        by_name: each function's values; None where it is not applicable.
    """

    total: list[float]
    by_name: dict[str, list[float | None]]


@dataclass(eq=False)
class _Job:
    prompts: list[Text]
    completions: list[Text]
    completion_ids: list[list[int]]
    result: Future[Scores] = field(default_factory=Future)


class ScoringQueue:
    """Scores what is there in one call, so that models read shared prompts once and small requests together.

    Args:
        rewards: the reward functions.
        max_batch: completions in one call, unless one request alone has more.
        run: does a piece of work in the thread that it belongs to; None for the queue's own.
        threads: CPU threads of the queue's own thread; None for what torch takes.
    """

    def __init__(
        self,
        rewards: RewardFunctions,
        *,
        max_batch: int = 512,
        run: Callable[[Callable[[], Any]], Any] | None = None,
        threads: int | None = None,
    ) -> None:
        self.rewards, self.max_batch = rewards, max_batch
        self._run_work, self._threads = run or (lambda work: work()), threads
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rlhf-scoring", daemon=True)
        self._thread.start()

    async def score(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
    ) -> Scores:
        """Scores of B completions.

        Args:
            prompts: B texts or messages.
            completions: B texts or messages.
            completion_ids: B lists of token ids.

        Raises:
            UserError: a function cannot score one of them.
        """
        job = _Job(list(prompts), list(completions), [list(ids) for ids in completion_ids])
        with self._changed:
            if self._closed:
                raise RuntimeError("the queue is closed")
            self._waiting.append(job)
            self._changed.notify()
        return await asyncio.wrap_future(job.result)

    def close(self) -> None:
        """End the thread; what waits is given up."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while (batch := self._next_batch()) is not None:
            if live := [job for job in batch if job.result.set_running_or_notify_cancel()]:
                self._settle(live)

    def _next_batch(self) -> list[_Job] | None:
        """Everything that waits, up to the limit; None when the queue is closed."""
        with self._changed:
            while not (self._waiting or self._closed):
                self._changed.wait()
            if self._closed:
                for job in self._waiting:
                    job.result.cancel()
                return None
            batch = [self._waiting.popleft()]
            size = len(batch[0].completions)
            while self._waiting and size + len(self._waiting[0].completions) <= self.max_batch:
                batch.append(self._waiting.popleft())
                size += len(batch[-1].completions)
            return batch

    def _settle(self, jobs: Sequence[_Job]) -> None:
        """Answer jobs together or, where that fails, each alone: one request's mistake is not the others'."""
        try:
            self._answer(jobs)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].result.set_exception(error)
                return
            for job in jobs:
                self._settle([job])

    def _answer(self, jobs: Sequence[_Job]) -> None:
        scores = self._run_work(
            lambda: self.rewards(
                [prompt for job in jobs for prompt in job.prompts],
                [completion for job in jobs for completion in job.completions],
                completion_ids=[ids for job in jobs for ids in job.completion_ids],
                columns={},
            )
        )
        start = 0
        for job in jobs:
            part = slice(start, start + len(job.completions))
            start = part.stop
            by_name = {
                name: [None if value != value else value for value in row[part].tolist()]
                for name, row in zip(scores.names, scores.rewards, strict=True)
            }
            job.result.set_result(Scores(scores.total[part].tolist(), by_name))


def reads_messages(rewards: Any) -> bool:
    """Whether reward functions get a conversation as messages: unless one is a model without chat template.

    Args:
        rewards: functions, as given to `RewardFunctions`.
    """
    for function in rewards:
        model = getattr(function, "model", None) or getattr(function, "ensemble", None)
        tokenizer = getattr(model, "tokenizer", None)
        if tokenizer is not None and getattr(tokenizer, "chat_template", None) is None:
            return False
    return True
