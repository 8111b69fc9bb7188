"""The same work on many tensors, in several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from rlhf_merge.errors import MergeError
from rlhf_merge.methods.blocks import Workspace

Item = TypeVar("Item")
Result = TypeVar("Result")
POLL_SECONDS = 2.0

OnRead = Callable[[int], None]
"""Told of the bytes of every block that was read; may be called from several threads."""
OnResults = Callable[[list[tuple[Item, Result]]], None]
"""Told of items that are finished, by the thread that waits for them."""


def map_tensors(
    work: Callable[[Item, Workspace, OnRead], Result],
    items: Sequence[Item],
    *,
    size: Callable[[Item], int],
    dtype: Callable[[Item], torch.dtype],
    threads: int | None = None,
    on_bytes: OnRead | None = None,
    on_results: OnResults[Item, Result] | None = None,
) -> list[Result]:
    """Do some work on every item, the largest first; the results are in the order of the items.

    Args:
        work: is given an item, the buffers of its thread, and what to call after every block it read.
        items: what to work on.
        size: of an item.
        dtype: of the arithmetic on an item, and of the buffers it is given.
        threads: how many items at once; None is one for each processor this process may use.
        on_bytes: called with the bytes of every block, perhaps from several threads.
        on_results: called by the calling thread with what is finished, every `POLL_SECONDS` at least.

    Raises:
        MergeError: an item's work raised it, which ends the work on the others.
    """
    if threads is not None and threads < 1:
        raise MergeError(
            f"threads must be at least 1, got {threads}; leave it out to use every processor",
            code="invalid_value",
            key="threads",
        )
    stop = threading.Event()
    local = threading.local()
    before = torch.get_num_threads()

    def on_read(count: int) -> None:
        if stop.is_set():
            raise _Stopped
        if on_bytes is not None:
            on_bytes(count)

    def run(item: Item) -> Result:
        torch.set_num_threads(1)
        spaces: dict[torch.dtype, Workspace] = local.__dict__.setdefault("spaces", {})
        space = spaces.setdefault(dtype(item), Workspace(dtype(item)))
        return work(item, space, on_read)

    pool = ThreadPoolExecutor(threads or processors(), thread_name_prefix="tensors")
    try:
        order = sorted(range(len(items)), key=lambda index: -size(items[index]))
        futures = {pool.submit(run, items[index]): index for index in order}
        results = _collect(futures, items, on_results)
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)
    return [results[index] for index in range(len(items))]


def _collect(
    futures: dict[Future[Result], int], items: Sequence[Item], on_results: OnResults[Item, Result] | None
) -> dict[int, Result]:
    """The results by the numbers of their items, as they come in."""
    results: dict[int, Result] = {}
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        found: list[tuple[Item, Result]] = []
        try:
            for future in sorted(done, key=lambda one: one.exception() is not None):  # failures last
                index = futures[future]
                results[index] = future.result()
                found.append((items[index], results[index]))
        finally:
            if on_results is not None:
                on_results(found)
    return results


def processors() -> int:
    """The number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Stopped(Exception):
    """Ends the work of a thread after another has failed."""
