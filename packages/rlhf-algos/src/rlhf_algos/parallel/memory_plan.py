"""How much memory each process of a training needs, by phase and part, from shapes and settings alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rlhf_algos.configs.trainer import HardwareConfig
from rlhf_algos.parallel.deepspeed_file import deepspeed_settings
from rlhf_algos.parallel.sharding import units
from rlhf_data import UserError
from rlhf_models import format_bytes, memory_text, quantised_weights

__all__ = [
    "CARDS",
    "Gathered",
    "Machine",
    "TrainedShape",
    "check_room",
    "gathered_parts",
    "memory_by_phase",
    "memory_rows",
    "packed_in_4bit",
    "peak_of",
    "plan_machine",
    "trained_shape",
]

Phases = dict[str, dict[str, float]]
Changes = Mapping[str, Any]

CARDS = {
    **{"t4": 16, "l4": 24, "a10g": 24, "rtx3090": 24, "rtx4090": 24, "rtx5090": 32, "v100": 32},
    **{"a100-40gb": 40, "a6000": 48, "l40s": 48, "a100": 80, "h100": 80, "h200": 141, "b200": 180},
    **{"mi250x": 64, "mi300x": 192},
}
"""Memory of GPUs in GB, as their makers state it."""
_USABLE = 0.9
"""Of a GPU's memory: CUDA's context, communication and the allocator's slack take the rest."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib)?", re.IGNORECASE)
_LIVE = 1_000_000_000
"""Parameters that ZeRO-3 may keep gathered, and elements of its optimizer's groups: DeepSpeed's defaults."""
_BUCKET = 500_000_000
"""Elements of a bucket of gradients, DeepSpeed's default."""
_PREFETCH = 50_000_000
"""Parameters that ZeRO-3 gathers ahead, DeepSpeed's default."""


@dataclass(frozen=True)
class Machine:
    """The processes that a job is planned for, and the GPU of each.

    Attributes:
        processes: how many.
        card: the GPU's name; None is the CPU of this machine.
        memory: bytes of the GPU; infinite for the CPU, which all processes share.
    """

    processes: int = 1
    card: str | None = None
    memory: float = math.inf

    @property
    def usable(self) -> float:
        """Bytes that a job may take of a GPU."""
        return _USABLE * self.memory


def plan_machine(processes: int, gpu: str | None) -> Machine:
    """The machine that options describe.

    Args:
        processes: how many.
        gpu: a key of `CARDS`, or a size such as 80GB; None is the CPU.

    Raises:
        UserError: it is neither.
    """
    if gpu is None:
        return Machine(processes)
    name = gpu.lower().replace(" ", "").replace("_", "-")
    if name in CARDS:
        return Machine(processes, name.upper(), CARDS[name] * 1e9)
    size = _SIZE.fullmatch(name)
    if size is None or float(size[1]) == 0:
        raise UserError(
            f"GPU {gpu!r} is unknown; expected a size such as 80GB, or one of {', '.join(CARDS)}",
            code="invalid_value",
            key="gpu",
        )
    unit = 1 << 30 if (size[2] or "").lower() == "gib" else 1e9
    return Machine(processes, gpu, float(size[1]) * unit)


@dataclass(frozen=True)
class Gathered:
    """Parameters of a model that are gathered together.

    Attributes:
        layer: of the largest layer.
        end: of the embedding or the output layer, the larger of those that share no weights.
        rest: of all others, such as an embedding that is the output layer too; they are gathered as long as
            the model runs.
    """

    layer: int = 0
    end: int = 0
    rest: int = 0

    @property
    def largest(self) -> int:
        """Of the largest of the three."""
        return max(self.layer, self.end, self.rest)

    def union(self, other: Gathered) -> Gathered:
        """Of two models that do not run at the same time."""
        return Gathered(*map(max, (self.layer, self.end, self.rest), (other.layer, other.end, other.rest)))


def gathered_parts(model: nn.Module, packed: Mapping[int, float] | None = None) -> Gathered:
    """The sizes of what `units` gives, for a model that may be on the meta device.

    Args:
        model: the model.
        packed: by a quantised weight's id, the parameters that need as many bytes.
    """
    sizes = {"layer": 0, "end": 0}
    smaller = packed or {}

    def size(parameters: Iterable[nn.Parameter]) -> int:
        return round(sum(smaller.get(id(each), each.numel()) for each in parameters))

    seen: set[int] = set()
    for unit in units(model):
        name = "layer" if any(True for _ in unit.children()) else "end"  # the ends are single modules
        own = [each for each in unit.parameters() if id(each) not in seen]
        seen.update(map(id, own))
        sizes[name] = max(sizes[name], size(own))
    return Gathered(**sizes, rest=size(each for each in model.parameters() if id(each) not in seen))


def packed_in_4bit(model: Any, itemsize: int) -> dict[int, float]:
    """Of a language model's weights in 4 bits, the parameters of `itemsize` bytes that need as many."""
    return {id(weight): weight.numel() * 0.5 / itemsize for weight in quantised_weights(model)}


@dataclass(frozen=True)
class TrainedShape:
    """Sizes of what is trained and of what stands beside it.

    Attributes:
        trained: parameters with a gradient, a separate value model's included.
        frozen: bytes of the others.
        reference: bytes of a frozen copy that is the reference; 0 without one.
        gathered: of the model whose parts are the largest.
        moments: bytes of both Adam moments of a parameter.
        unsharded: bytes that every process has whole, beside `frozen`: the scales of 4-bit weights.
    """

    trained: int
    frozen: float
    reference: float
    gathered: Gathered
    moments: float = 8.0
    unsharded: float = 0.0


def trained_shape(
    model: nn.Module,
    *,
    frozen: float,
    reference: float,
    moments: float,
    unsharded: float = 0.0,
    packed: Mapping[int, float] | None = None,
) -> TrainedShape:
    """The shape of a model, which may be on the meta device.

    Args:
        model: with its adapters.
        frozen: bytes of its frozen parameters, but those of `unsharded`.
        reference: bytes of a frozen copy of it; 0 without one.
        moments: bytes of both moments of a trained parameter.
        unsharded: see `TrainedShape`.
        packed: see `gathered_parts`.
    """
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    gathered = gathered_parts(model, packed)
    return TrainedShape(trained, frozen, reference, gathered, moments, unsharded)


def memory_by_phase(
    config: HardwareConfig,
    shape: TrainedShape,
    machine: Machine,
    *,
    half: bool,
    activations: float,
    cache: float = 0.0,
) -> Phases:
    """Bytes of each process by phase (load, rollout, update, checkpoint) and part.

    Per trained parameter in fp32: a weight 4, a gradient 4, two moments 8.  Autocast keeps copies in half
    precision, 2, and DDP buckets of gradients, 4.  FSDP divides all by the processes and gathers a layer at a
    time.  ZeRO (arXiv:1910.02054) keeps weights and gradients in the precision of the computation and a copy
    of the weights in fp32 (stage 3 none of weights in fp32); stage 1 divides that copy and the moments, 2
    gradients too, 3 weights too.  What a GPU offloads is not counted.

    Args:
        config: precision and kind of parallelism.
        shape: of what is trained.
        machine: how many processes, and on what.
        half: whether is computed in half precision.
        activations: bytes that the largest forward and backward pass keeps.
        cache: bytes of keys and values of a rollout; 0 without one.
    """
    if config.fsdp:
        parts, gathered, in_update = _fsdp(config, shape, machine, half)
    elif config.deepspeed:
        parts, gathered, in_update = _zero(deepspeed_settings(config.deepspeed), shape, machine, half)
    else:
        count = shape.trained
        parts = {"weights": 4.0 * count + shape.frozen + shape.unsharded, "reference": shape.reference}
        parts |= {"gradients": 4.0 * count, "moments": shape.moments * count}
        gathered, in_update = 0.0, {}
        if half:
            in_update["weights in half precision"] = 2.0 * count
        if machine.processes > 1:
            in_update["buckets of gradients"] = 4.0 * count
    held = {name: parts[name] for name in ("weights", "reference")}
    kept = held | {name: size for name, size in parts.items() if name not in ("gradients", *held)}
    phases = {"load": held | {"gathered layers": gathered}}
    if cache:
        phases["rollout"] = kept | {"gathered layers": gathered, "keys and values": cache}
    phases["update"] = kept | {"gradients": parts["gradients"], "activations": activations} | in_update
    phases["checkpoint"] = kept | {"a gathered layer": 4.0 * shape.gathered.largest if gathered else 0.0}
    return phases


def _fsdp(
    config: HardwareConfig, shape: TrainedShape, machine: Machine, half: bool
) -> tuple[dict[str, float], float, dict[str, float]]:
    """Parts, what is gathered in a forward pass, and what comes on top in an update."""
    own = 1 / machine.processes
    if config.fsdp_cpu_offload and machine.card:
        own = 0.0
    count = shape.trained * own
    parts = {"weights": 4 * count + shape.frozen * own + shape.unsharded, "reference": shape.reference * own}
    parts |= {"gradients": 4 * count, "moments": shape.moments * count}
    size, most = 2 if half else 4, shape.gathered
    # A layer, what it is copied from, and the one gathered before it; what is not in a layer stays.
    gathered = size * (max(3.0 * most.layer, 2.0 * most.end) + most.rest)
    # In a backward pass gradients too, and the copies of them that are summed.  The output layer comes first:
    # nothing is gathered beside it, and what it was copied from is free by then.  The rest comes last.
    backward = max((3 * size + 8.0) * most.layer, (size + 8.0) * most.end) + 2.0 * size * most.rest
    backward = max(backward, (size + 8.0) * most.rest)
    return parts, gathered, {"gathered layers": max(gathered, backward)}


def _zero(
    settings: Mapping[str, Any], shape: TrainedShape, machine: Machine, half: bool
) -> tuple[dict[str, float], float, dict[str, float]]:
    """The same as `_fsdp` gives, for DeepSpeed."""
    section = settings["zero_optimization"]
    stage, size = int(section["stage"]), 2 if half else 4
    count, own = shape.trained, shape.trained / machine.processes
    split = 1 / machine.processes if stage == 3 else 1.0
    parts = {"weights": (size * count + shape.frozen) * split + shape.unsharded}
    parts["reference"] = shape.reference * split
    parts["gradients"] = size * (count if stage == 1 else own)
    parts["fp32 copy of the weights"] = 4.0 * own if half or stage < 3 else 0.0
    parts["moments"] = shape.moments * own
    bucket = min(float(section.get("reduce_bucket_size", _BUCKET)), float(count))
    in_update = {"buckets of gradients": size * bucket * (2 if stage == 3 else 1)}  # summed in a copy
    group = min(float(section.get("sub_group_size", _LIVE)), own) if stage == 3 else own
    gathered = 0.0
    if stage == 3:
        everything = count + (shape.frozen + shape.reference) / size
        gathered = size * min(float(section.get("stage3_max_live_parameters", _LIVE)), everything)
        gathered = max(gathered, 2.0 * size * shape.gathered.largest)
        ahead = min(float(section.get("stage3_prefetch_bucket_size", _PREFETCH)), everything)
        in_update["gathered layers"] = max(gathered, min(gathered + size * ahead, size * everything))
    if machine.card:
        if (section.get("offload_optimizer") or {}).get("device", "none") != "none":
            parts |= {"fp32 copy of the weights": 0.0, "moments": 0.0}
            group = 0.0
        if (section.get("offload_param") or {}).get("device", "none") != "none":
            parts |= {"weights": shape.unsharded, "reference": 0.0}
    in_update["gradients in fp32"] = 4.0 * group
    return parts, gathered, in_update


def peak_of(memory: Phases) -> float:
    """Bytes of the phase that needs most."""
    return max(sum(parts.values()) for parts in memory.values())


def memory_rows(memory: Phases, machine: Machine, device: str) -> list[tuple[str, str]]:
    """The result of `memory_by_phase` as labels and texts; `device` is used if the machine names no GPU."""
    where = f"memory on {machine.card or device}"
    if machine.processes > 1:
        where += f", each of {machine.processes:,} processes"
    peak = max(memory, key=lambda phase: sum(memory[phase].values()))
    phases = (f"{phase} {format_bytes(sum(parts.values()))}" for phase, parts in memory.items())
    return [(where, memory_text(memory[peak])), ("memory by phase", ", ".join(phases))]


def check_room(
    needs: Callable[[Changes, Machine], float | None],
    machine: Machine,
    *,
    alternatives: Sequence[Changes],
    spread: Changes,
) -> None:
    """Refuse a job that the machine's GPUs cannot hold, with the nearest settings that they can.

    Args:
        needs: bytes of each process at its peak, with some settings changed; None where they do not go
            together.
        machine: what is planned for.
        alternatives: changes of settings that save memory, those that change the training least first.
        spread: the changes with which more processes need less each.

    Raises:
        UserError: they cannot.
    """
    needed = needs({}, machine)
    if needed is None or needed <= machine.usable:
        return
    hint = "no setting of one process makes it fit; plan for more of them with --processes"
    for changes in alternatives:
        less = needs(changes, machine)
        if less is not None and less <= machine.usable:
            hint = f"with {_options(changes)} it needs {format_bytes(less)}"
            break
    else:
        for count in (1 << power for power in range(1, 12)):
            less = needs(spread, replace(machine, processes=count))
            if less is not None and less <= machine.usable:
                hint = f"{count} of them hold it with {_options(spread)}"
                break
    raise UserError(
        f"each process needs {format_bytes(needed)} at its peak, and a {machine.card} has "
        f"{format_bytes(machine.memory)}, of which nine tenths can be used; {hint}",
        code="does_not_fit",
        needed=needed,
        usable=machine.usable,
    )


def _options(changes: Changes) -> str:
    """Changes of settings as options of the command."""
    given = ((key, str(value).lower()) for key, value in changes.items() if value is not None)
    return " ".join(f"--set {key}={value}" for key, value in given)
