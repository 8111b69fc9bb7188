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
    "all_gather",
    "all_reduce",
    "all_reduce_gradients",
    "all_reduce_max",
    "barrier",
    "broadcast",
    "init_process_group",
    "is_main_process",
    "main_process_first",
    "rank",
    "shard",
    "world_size",
]

_BUCKET = 1 << 26
"""Numbers of gradients that are added up in one message."""

T = TypeVar("T")


def world_size() -> int:
    """How many processes `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this process makes folders and prints."""
    return rank() == 0


def barrier() -> None:
    """Wait until every process has come here."""
    if world_size() > 1:
        init_process_group().wait_for_everyone()


def broadcast(value: Any) -> Any:
    """The first process's value; every process must call it.

    Args:
        value: the first process's value; those of the others are ignored.
    """
    if world_size() == 1:
        return value
    from accelerate.utils import broadcast_object_list

    init_process_group()
    return broadcast_object_list([value])[0]


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Run a block in the first process, then in the others; for what the first one builds and caches."""
    if world_size() == 1:
        yield
        return
    state = init_process_group()
    if not is_main_process():
        state.wait_for_everyone()
    yield
    if is_main_process():
        state.wait_for_everyone()


def shard(items: Sequence[T]) -> Sequence[T]:
    """This process's part of what all of them have: neighbours, which may share a prefix, stay together."""
    count, own, size = len(items), rank(), world_size()
    return items[count * own // size : count * (own + 1) // size]


def all_gather(own: Sequence[T]) -> list[T]:
    """The parts of all processes, in the order that `shard` cut; every process must call it."""
    if world_size() == 1:
        return list(own)
    import torch.distributed as dist

    init_process_group()
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, list(own))
    return [item for part in parts for item in part]


def all_reduce(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes; every process must call it."""
    if world_size() == 1:
        return values
    import torch.distributed as dist

    init_process_group()
    values = values.clone()
    dist.all_reduce(values)
    return values


def all_reduce_max(number: int) -> int:
    """The largest number that any process gave; every process must call it."""
    if world_size() == 1:
        return number
    import torch
    import torch.distributed as dist

    value = torch.tensor([number], device=init_process_group().device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)


def all_reduce_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Put in the place of every gradient its sum over all processes; a missing one counts as zero.

    Every process must call it with the same parameters.
    """
    if world_size() == 1:
        return
    import torch
    import torch.distributed as dist

    init_process_group()
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


def init_process_group() -> Any:
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
