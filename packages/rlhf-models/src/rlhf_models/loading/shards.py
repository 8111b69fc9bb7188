"""Weights that several processes hold in parts: read slice by slice now, put in place when they are sharded.

A *deferred* model is on the meta device: it has shapes and no values.  It is given heads, adapters and a
reference, and sharded, like any other; `fill_deferred` then puts this process's rows of every parameter in
place.  No process ever holds more of it than its rows and the largest parameter.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import copy
import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from rlhf_data import UserError
from rlhf_models.loading.quantization import quantise_deferred

Returned = TypeVar("Returned")
_GATHER = contextvars.ContextVar[Callable[[Tensor], Tensor] | None]("gather", default=None)
_DEFERRED = "_deferred_weights"
"""Attribute of modules whose parameters have no values yet: the shards, and the module's name in them."""
_RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
"""In-place operators that initialisations draw with."""


class Shards:
    """This process's rows of a model's parameters, and its buffers whole."""

    def __init__(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        self.parameters, self.buffers = parameters, buffers

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        return self  # copies of a deferred model get their values from the same shards


def is_sharded(parameter: Tensor) -> bool:
    """Whether this process holds a part of a parameter only, by FSDP or by ZeRO-3."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


@contextlib.contextmanager
def gathering(gather: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within this context `whole_value` gives whole parameters.

    Args:
        gather: gives a sharded parameter whole.
    """
    token = _GATHER.set(gather)
    try:
        yield
    finally:
        _GATHER.reset(token)


def whole_value(parameter: Tensor) -> Tensor:
    """The values of a parameter; of a sharded one all of them, within a `gathering` context.

    Raises:
        ValueError: the parameter is sharded and its values have not been gathered.
    """
    if not is_sharded(parameter):
        return parameter.detach()
    gather = _GATHER.get()
    if gather is None:
        raise ValueError("the parameter is spread over processes; gather it first")
    return gather(parameter)


class ShardUnit:
    """A module around one model, whose parameters beside its layers are gathered while the module runs."""

    shard_unit: ClassVar[bool] = True

    def call(self, function: Callable[[], Returned]) -> Returned:
        """Run a function that uses the model in another way than `forward` does."""
        return function()


def load_shards(
    auto_class: Any,
    name_or_path: str,
    *,
    config: PreTrainedConfig,
    quantization: BitsAndBytesConfig | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A deferred model of a stored one; every process must call it.

    transformers reads this process's slices of the files, converted to the model's names.  With
    `quantization` they are put in place in 4 bits, each weight whole in every process for a moment.

    Returns:
        The model, and transformers' loading info.

    Raises:
        UserError: 8 bits are asked for, the files hold quantised weights, or a layer cannot be quantised.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"the files of {name_or_path} hold quantised weights, which cannot be read in parts; name the "
            "model that they were made of, with load_in_4bit, or leave out fsdp and ZeRO-3",
            code="quantised_and_sharded",
        )
    planned = copy.deepcopy(config)
    text: Any = planned.get_text_config()
    text.base_model_fsdp_plan = text.base_model_fsdp_plan or {"layers.*": "free_full_weight"}
    processes = DistributedConfig(fsdp_size=dist.get_world_size())
    read, info = auto_class.from_pretrained(
        name_or_path, config=planned, distributed_config=processes, **options
    )
    parameters: dict[str, Tensor] = dict(read.named_parameters(remove_duplicate=False))
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=read.dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(parameters[name].dtype)
    if getattr(read, "generation_config", None) is not None:
        model.generation_config = read.generation_config
    if quantization is not None:
        quantise_deferred(model, quantization, f"model {name_or_path}")
    model._weight_conversions = getattr(read, "_weight_conversions", None)
    model.name_or_path = model.config._name_or_path = name_or_path
    defer(model, Shards(parameters, dict(read.named_buffers())))
    return model.eval(), info


def defer(model: nn.Module, shards: Shards) -> None:
    """Mark the parameters and buffers of a model on the meta device as having their values in `shards`."""
    for name, module in model.named_modules():
        if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())):
            setattr(module, _DEFERRED, (shards, f"{name}." if name else ""))


def share_deferred(source: nn.Module, target: nn.Module) -> None:
    """Let the modules of `target` get their values from where those of `source`, of the same shape, do."""
    for one, other in zip(source.modules(), target.modules(), strict=True):
        if (found := getattr(one, _DEFERRED, None)) is not None:
            setattr(other, _DEFERRED, found)


def settle(module: nn.Module) -> None:
    """Give one module parameters of its own on the CPU, without values, in place of its deferred ones."""
    module.to_empty(device="cpu", recurse=False)
    if hasattr(module, _DEFERRED):
        delattr(module, _DEFERRED)


def is_deferred(model: nn.Module) -> bool:
    """Whether some parameters of a model have no values yet."""
    return any(hasattr(module, _DEFERRED) for module in model.modules())


def forget_deferred(model: nn.Module) -> None:
    """Let a model without values stay one."""
    for module in model.modules():
        if hasattr(module, _DEFERRED):
            delattr(module, _DEFERRED)


@contextlib.contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Within this context deferred parameters are on the CPU, without memory, for code that moves to them.

    What the code makes beside them, such as adapters, is real then.
    """
    waiting = list(_waiting(model))
    for _, _, parameter, owner, name in waiting:
        value = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        owner._parameters[name] = made = nn.Parameter(value, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))  # how it is quantised
    try:
        yield
    finally:
        for _, _, parameter, owner, name in waiting:
            parameter.requires_grad_(owner._parameters[name].requires_grad)
            owner._parameters[name] = parameter


class _Drawing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _RANDOM and args[0].is_meta:
            func(torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def random_draws_on_meta() -> Iterator[None]:
    """Make modules on the meta device, but draw the random numbers that they would be initialised with.

    So what is drawn afterwards is what would be drawn after a real initialisation.
    """
    with torch.device("meta"), _Drawing():
        yield


@torch.no_grad()
def fill_deferred(
    root: nn.Module,
    device: torch.device,
    *,
    then: Callable[[nn.Parameter], None] | None = None,
    storage: torch.dtype = torch.uint8,
) -> None:
    """Put values into the deferred parameters below `root`; every process must call it.

    A parameter that is sharded gets this process's rows, another one all of them.

    Args:
        root: whatever holds the deferred models.
        device: where the values go.
        then: called with every parameter when it is in place.
        storage: type of the parameters that 4-bit weights are packed into, if they are not sharded yet.
    """
    new: dict[int, nn.Parameter] = {}
    files = mapped_files()
    for (shards, name), places in _by_source(root).items():
        rows = shards.parameters.pop(name)
        for parameter, owner, attribute in places:
            if id(parameter) in new:  # it is tied
                owner._parameters[attribute] = new[id(parameter)]
                continue
            if attribute == "weight" and hasattr(owner, "pack"):
                values = _packed(owner, rows, device, storage)
            else:
                values = _values(parameter, rows, device)
            made = nn.Parameter(values, requires_grad=parameter.requires_grad)
            new[id(parameter)] = owner._parameters[attribute] = made
            if then is not None:
                then(made)
        forget_pages(_own(rows), files)
    for module in root.modules():
        if (found := getattr(module, _DEFERRED, None)) is not None:
            shards, prefix = found
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = shards.buffers[prefix + name].to(device, copy=True)
            delattr(module, _DEFERRED)


def _waiting(root: nn.Module) -> Iterator[tuple[Shards, str, nn.Parameter, Any, str]]:
    """Deferred parameters: shards, name in them, parameter, its module, and the name it has there."""
    for module in root.modules():
        shards, prefix = getattr(module, _DEFERRED, (None, ""))
        for name, parameter in module._parameters.items():
            if shards is not None and parameter is not None:
                yield shards, prefix + name, parameter, module, name


def _by_source(root: nn.Module) -> dict[tuple[Shards, str], list[tuple[nn.Parameter, Any, str]]]:
    """Deferred parameters by where their values are, with their modules and the names they have there."""
    found: dict[tuple[Shards, str], list[tuple[nn.Parameter, Any, str]]] = {}
    for shards, name, parameter, owner, attribute in _waiting(root):
        found.setdefault((shards, name), []).append((parameter, owner, attribute))
    return found


def _own(rows: Tensor) -> Tensor:
    return rows.to_local() if isinstance(rows, DTensor) else rows.detach()


def _whole(rows: Tensor) -> Tensor:
    return rows.full_tensor() if isinstance(rows, DTensor) else rows.detach()


def _packed(layer: Any, rows: Tensor, device: torch.device, storage: torch.dtype) -> Tensor:
    """The weight of a `ShardedLinear4bit`, packed, in memory of its own, sharded where it is."""
    parameter = layer.weight
    if not isinstance(parameter, DTensor):
        return layer.pack(_whole(rows), device, storage)
    packed = layer.pack(_whole(rows), device, parameter.dtype)
    placed: Any = distribute_tensor(packed, parameter.device_mesh, parameter.placements, src_data_rank=None)
    own = placed.to_local().clone()
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=packed.shape, stride=(1,)
    )


def _values(parameter: Any, rows: Tensor, device: torch.device) -> Tensor:
    """The values of a parameter in memory of its own, sharded where it is."""
    if not isinstance(parameter, DTensor):
        return _whole(rows).to(device, parameter.dtype, copy=True)
    return DTensor.from_local(
        _own(rows).to(device, parameter.dtype, copy=True),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def mapped_files() -> list[tuple[int, int]]:
    """Addresses, from and to, ascending, at which this process has files mapped; known on Linux only."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    ranges = [line.partition(" ")[0].split("-") for line in lines if "/" in line]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def forget_pages(values: Tensor, files: list[tuple[int, int]]) -> None:
    """Let go of the pages of the file that values were read from, which has them still.

    Else they, and those that the system mapped around them, count as this process's memory until the file
    is closed.

    `files` are of `mapped_files`, after the values were read.
    """
    address = values.data_ptr()
    at = bisect.bisect_right(files, (address, math.inf)) - 1
    if values.device.type == "cpu" and at >= 0 and address < files[at][1]:
        start, end = files[at]
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
