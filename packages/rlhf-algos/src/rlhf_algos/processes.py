"""The processes of a job before it has a trainer: who writes, and how the others learn what was written."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["connect", "first_process_first", "from_first_process", "is_first_process", "num_processes"]


def num_processes() -> int:
    """How many processes `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process makes folders and prints."""
    return int(os.environ.get("RANK", "0")) == 0


def from_first_process(value: Any) -> Any:
    """What the first process gave; every process must call it.

    Args:
        value: of the first process; that of the others is ignored.
    """
    if num_processes() == 1:
        return value
    from accelerate.utils import broadcast_object_list

    connect()
    return broadcast_object_list([value])[0]


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """Run a block in the first process, then in the others; for what the first one builds and caches."""
    if num_processes() == 1:
        yield
        return
    state = connect()
    if not is_first_process():
        state.wait_for_everyone()
    yield
    if is_first_process():
        state.wait_for_everyone()


def connect() -> Any:
    """Join the group of processes, once; Accelerate's `PartialState`.

    The group is left when Python ends: its threads, still running then, would abort the process now and then.
    """
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    atexit.unregister(_leave)
    atexit.register(_leave)
    return state


def _leave() -> None:
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
