"""Splitting a module's parameters over the processes: FSDP2, and ZeRO-3 from the first byte.

Both take models that exist already and deferred ones, whose values are read when they are put in place
(`rlhf_models.loading.shards`).
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_models import fill_deferred

__all__ = ["partition", "reshard", "return_freed_memory", "shard", "step_in_place", "units"]

_M_MMAP_THRESHOLD = -3
"""Of mallopt(3): blocks of this size and more are mapped one by one."""


def shard(
    module: nn.Module,
    device: torch.device,
    *,
    half: torch.dtype | None = None,
    offload: bool = False,
    frozen: Iterable[nn.Parameter] = (),
) -> None:
    """Shard all parameters but `frozen` with FSDP2, in place.

    Decoder layers are gathered one by one, embedding and output layer likewise where they share no weights.
    What else a model has is gathered while the module runs that calls the model (`shard_unit`).

    Args:
        module: what is trained, with whatever it needs: reference, value model.
        device: of this process.
        half: type that parameters are gathered and computed in; None keeps theirs.
        offload: keep shards, gradients and optimizer in main memory.
        frozen: parameters that stay whole.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    options: dict[str, Any] = {"ignored_params": set(frozen)}
    if half is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    place = torch.device("cpu") if offload else device
    if device.type == "cpu":
        return_freed_memory()
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(place))
    for unit in [*units(module), module]:
        fully_shard(unit, **options)
        if hasattr(unit, "call"):
            register_fsdp_forward_method(unit, "call")
    fill_deferred(module, place)


def return_freed_memory() -> None:
    """Let freed blocks of 128 KiB and more go back to the system, not into the pool of the C library.

    Parameters are gathered and freed over and over; the pool, with holes between the shards, would come to
    hold as much as the whole model.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc's
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 17)


def reshard(module: nn.Module) -> None:
    """Let FSDP's modules go of what they gathered, which they keep where no backward pass follows."""
    from torch.distributed.fsdp import FSDPModule

    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def units(module: nn.Module) -> list[nn.Module]:
    """The modules below one whose parameters are gathered together, inner ones first."""
    layers = {name for each in module.modules() for name in getattr(each, "_no_split_modules", None) or ()}
    inner = [each for each in module.modules() if type(each).__name__ in layers]
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    ends = [
        end for each in module.modules() if isinstance(each, PreTrainedModel) for end in _ends(each, uses)
    ]
    outer = [each for each in module.modules() if getattr(each, "shard_unit", False) and each is not module]
    return [*reversed(inner), *dict.fromkeys(ends), *reversed(outer)]


def _ends(model: PreTrainedModel, uses: Mapping[int, int]) -> list[nn.Module]:
    """The embedding and the output layer of a model, but for those whose weights another module has too.

    Args:
        model: a language model, or the part of one without its output layer.
        uses: by parameter, in how many places of all that is sharded it is.
    """
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    return [end for end in ends if all(uses[id(parameter)] == 1 for parameter in end.parameters())]


def partition(
    module: nn.Module, device: torch.device, settings: dict[str, Any], *, storage: torch.dtype
) -> None:
    """Put the values of deferred parameters in place and partition them as ZeRO-3 does, one at a time.

    Args:
        module: holds them.
        device: of this process.
        settings: DeepSpeed's, with a `zero_optimization` section of stage 3.
        storage: type of the parameters that 4-bit weights are packed into; DeepSpeed wants one of all.
    """
    import deepspeed

    if device.type == "cpu":
        return_freed_memory()
    converted: list[Any] = []

    def convert(parameter: nn.Parameter) -> None:
        if converted:
            converted[0].convert_to_zero_parameters(param_list=[parameter])
        else:
            holder = nn.Module()
            holder.register_parameter("first", parameter)
            deepspeed.zero.Init(module=holder, config_dict_or_path=settings)
            converted.append(parameter)

    fill_deferred(module, device, then=convert, storage=storage)


def step_in_place(optimizer: Any) -> None:
    """Let ZeRO-3 step weights that are in fp32 themselves, not a copy of them.

    DeepSpeed means to do so, but compares a `torch.device` with its name, which are never equal
    (deepspeed/runtime/zero/stage3.py, `_create_fp32_partitions`, 0.19).

    To be called before the optimizer's first step.
    """
    pairs = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    for weights, stepped in pairs:
        if weights is None or weights.shape != stepped.shape:  # on disk
            continue
        if (weights.dtype, weights.device) == (stepped.dtype, stepped.device):
            stepped.data = weights.data
