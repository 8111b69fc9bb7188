"""Work done ahead of the step that needs it, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


def read_ahead(
    read: Callable[[_Asked], _Found], asked: Iterable[_Asked], *, workers: int, depth: int = 2
) -> Iterator[_Found]:
    """Yield `read(each)` for each of `asked`, in order, while threads work on the next ones.

    Args:
        read: called from several threads at a time.
        asked: the arguments of its calls.
        workers: threads; with 0 everything is read on demand.
        depth: items read ahead, for each thread.
    """
    if not workers:
        yield from map(read, asked)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read-ahead")
    waiting: deque[Future[_Found]] = deque()
    try:
        for each in asked:
            waiting.append(pool.submit(read, each))
            if len(waiting) > workers * depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
