"""The processes of a job before it has a trainer: who writes, and how the others learn what was written."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "add_gradients",
    "connect",
    "first_process_first",
    "from_first_process",
    "gathered",
    "is_first_process",
    "maximum",
    "num_processes",
    "own_part",
    "process_number",
    "summed",
    "wait_for_all",
]

_BUCKET = 1 << 26
"""Numbers of gradients that are added up in one message."""

T = TypeVar("T")


def num_processes() -> int:
    """How many processes `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_number() -> int:
    """Number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_first_process() -> bool:
    """Whether this process makes folders and prints."""
    return process_number() == 0


def wait_for_all() -> None:
    """Wait until every process has come here."""
    if num_processes() > 1:
        connect().wait_for_everyone()


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


def own_part(items: Sequence[T]) -> Sequence[T]:
    """This process's part of what all of them have: neighbours, which may share a prefix, stay together."""
    count, rank, size = len(items), process_number(), num_processes()
    return items[count * rank // size : count * (rank + 1) // size]


def gathered(own: Sequence[T]) -> list[T]:
    """The parts of all processes, in the order that `own_part` cut; every process must call it."""
    if num_processes() == 1:
        return list(own)
    import torch.distributed as dist

    connect()
    parts: list[Any] = [None] * num_processes()
    dist.all_gather_object(parts, list(own))
    return [item for part in parts for item in part]


def summed(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes; every process must call it."""
    if num_processes() == 1:
        return values
    import torch.distributed as dist

    connect()
    values = values.clone()
    dist.all_reduce(values)
    return values


def maximum(number: int) -> int:
    """The largest number that any process gave; every process must call it."""
    if num_processes() == 1:
        return number
    import torch
    import torch.distributed as dist

    value = torch.tensor([number], device=connect().device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)


def add_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Put in the place of every gradient its sum over all processes; a missing one counts as zero.

    Every process must call it with the same parameters.
    """
    if num_processes() == 1:
        return
    import torch
    import torch.distributed as dist

    connect()
    for bucket in _buckets(parameters):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one dtype, of at most `_BUCKET` numbers unless one alone has more."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        size = sum(each.numel() for each in bucket) + parameter.numel()
        if bucket and (size > _BUCKET or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


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
