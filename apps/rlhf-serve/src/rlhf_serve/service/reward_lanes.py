"""Reward functions that cannot be awaited, called with the completions of many requests at a time."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_infer import Samples, ScorerUnavailable, async_loop
from rlhf_infer.rewards.combine import Source

Rows = dict[str, list[float]]
"""Rewards by the name of their row, NaN where one is not applicable."""


@dataclass(eq=False)
class _Job:
    samples: Samples
    result: Future[Rows] = field(default_factory=Future)

    @property
    def size(self) -> int:
        return len(self.samples.completions)


class Lane:
    """Reward functions with their own thread; all waiting completions are scored in one call.

    Where a call fails, each request's part is tried alone, so that one mistake does not fail the others;
    unless a connection failed, which would fail again for each of them.

    Args:
        sources: the functions.
        name: the thread's name.
        run: does a piece of work in the thread that it belongs to; None for the lane's own.
        threads: CPU threads of the lane's own thread; None for torch's default.
        max_batch: completions in one call, unless one request alone has more.
        last_s: seconds that a function has to return when the lane is closed; None for no limit.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        name: str,
        run: Callable[[Callable[[], Any]], Any] | None = None,
        threads: int | None = None,
        max_batch: int = 512,
        last_s: float | None = None,
    ) -> None:
        self.sources, self.max_batch, self._last_s = tuple(sources), max_batch, last_s
        self._run_work, self._threads = run or (lambda work: work()), threads
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"rlhf-scoring-{name}", daemon=True)
        self._thread.start()

    async def rows(self, samples: Samples) -> Rows:
        """The rewards of some completions.

        Raises:
            Exception: what a function raises.
        """
        job = _Job(samples)
        with self._changed:
            if self._closed:
                raise RuntimeError("the lane is closed")
            self._waiting.append(job)
            self._changed.notify()
        return await asyncio.wrap_future(job.result)

    def close(self) -> None:
        """Cancel waiting jobs and end the thread; a hanging one does not keep the process from ending."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(self._last_s)

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while (batch := self._next_batch()) is not None:
            if live := [job for job in batch if job.result.set_running_or_notify_cancel()]:
                self._settle(live)

    def _next_batch(self) -> list[_Job] | None:
        """Waiting requests with the columns of the first, up to the limit; None when the lane is closed."""
        with self._changed:
            while not (self._waiting or self._closed):
                self._changed.wait()
            if self._closed:
                for job in self._waiting:
                    job.result.cancel()
                return None
            batch = [self._waiting.popleft()]
            size, columns = batch[0].size, set(batch[0].samples.columns)
            while self._waiting:
                job = self._waiting[0]
                if size + job.size > self.max_batch or set(job.samples.columns) != columns:
                    break
                batch.append(self._waiting.popleft())
                size += job.size
            return batch

    def _settle(self, jobs: Sequence[_Job]) -> None:
        """Answer jobs together or, where that fails and one of them may be the reason, each alone."""
        try:
            self._answer(jobs)
        except Exception as error:
            if len(jobs) == 1 or is_connection_failure(error):
                for job in jobs:
                    job.result.set_exception(error)
                return
            for job in jobs:
                self._settle([job])

    def _answer(self, jobs: Sequence[_Job]) -> None:
        samples = _joined([job.samples for job in jobs])
        rows: Rows = self._run_work(lambda: self._rows(samples))
        start = 0
        for job in jobs:
            part = slice(start, start + job.size)
            start = part.stop
            job.result.set_result({name: row[part] for name, row in rows.items()})

    def _rows(self, samples: Samples) -> Rows:
        rows: Rows = {}
        for source in self.sources:
            result = source.call(samples)
            if inspect.isawaitable(result):
                result = async_loop.submit(result).result()
            rows |= zip(source.rows, source.checked(result, samples), strict=True)
        return rows


def is_connection_failure(error: BaseException) -> bool:
    """Whether the network or the system failed: that would fail for every request alike."""
    httpx = sys.modules.get("httpx")  # its errors can only be raised where it is used
    kinds: tuple[Any, ...] = (OSError, ScorerUnavailable, *([httpx.HTTPError] if httpx else []))
    return any(isinstance(each, kinds) for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _joined(parts: Sequence[Samples]) -> Samples:
    """The samples of several requests one after the other."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    ids = None if first.completion_ids is None else [i for part in parts for i in part.completion_ids or ()]
    return Samples(
        [prompt for part in parts for prompt in part.prompts],
        [completion for part in parts for completion in part.completions],
        ids,
        {name: [value for part in parts for value in part.columns[name]] for name in first.columns},
    )
