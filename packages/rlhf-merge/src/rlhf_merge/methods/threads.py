"""The same work on many tensors, in several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from rlhf_merge.errors import MergeError
from rlhf_merge.methods.blocks import Workspace

Item = TypeVar("Item")
Result = TypeVar("Result")
OnRead = Callable[[int], None]
"""Told of the bytes of every block that was read; may be called from several threads."""


def map_tensors(
    work: Callable[[Item, Workspace, OnRead], Result],
    items: Sequence[Item],
    *,
    size: Callable[[Item], int],
    dtype: Callable[[Item], torch.dtype],
    threads: int | None = None,
    on_bytes: OnRead | None = None,
) -> list[Result]:
    """Do some work on every item, the largest first; the results are in the order of the items."""
    if threads is not None and threads < 1:
        raise MergeError(f"threads must be at least 1, got {threads}; leave it out to use every processor")
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
        futures = {index: pool.submit(run, items[index]) for index in order}
        results = {index: futures[index].result() for index in order}
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)
    return [results[index] for index in range(len(items))]


def processors() -> int:
    """The number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Stopped(Exception):
    """Ends the work of a thread after another has failed."""
