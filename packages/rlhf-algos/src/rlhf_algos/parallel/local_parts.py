"""The part of a parameter that this process holds, under FSDP and ZeRO-3: read, written, put together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["local_part", "part_of_whole", "set_local_part", "whole_of_part"]


def local_part(parameter: Any) -> Tensor:
    """This process's part of a parameter, without gradients; all of one that is not sharded.

    Under ZeRO-3 it is one-dimensional, and padded in the last processes.
    """
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.detach()
    value: Any = parameter.detach()
    return value.to_local() if isinstance(parameter, DTensor) else value


@torch.no_grad()
def set_local_part(parameter: Any, value: Tensor) -> None:
    """Write what `local_part` gave, between forward passes.

    DeepSpeed's copy in fp32 of a weight in half precision, from which the next step starts, stays as it is.
    """
    local_part(parameter).copy_(value)
    if hasattr(parameter, "ds_tensor"):
        parameter.partition()  # let go of what is gathered for good, which is old now


def whole_of_part(parameter: Any, part: Tensor) -> Tensor:
    """The whole of what every process holds such a part of; every process must call it.

    Args:
        parameter: tells how it is split.
        part: as `local_part` gives it, on any device.
    """
    if hasattr(parameter, "ds_tensor"):
        part = part.to(parameter.ds_tensor.device)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part.to(parameter.device_mesh.device_type),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()


def part_of_whole(parameter: Any, whole: Tensor) -> Tensor:
    """This process's part, as `local_part` gives it, of a tensor that is split as a parameter is."""
    if hasattr(parameter, "ds_tensor"):
        size = parameter.ds_tensor.numel()
        start = min(dist.get_rank() * size, whole.numel())
        own = whole.flatten()[start : start + size]
        return torch.nn.functional.pad(own, (0, size - own.numel()))
    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device_mesh.device_type)
    return distribute_tensor(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    ).to_local()
