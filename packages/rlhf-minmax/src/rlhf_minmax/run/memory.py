"""Memory estimate of a run, from the shapes of its models, on the memory plan of all methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from rlhf_algos import (
    MOMENT_BYTES,
    Gathered,
    Machine,
    TrainedShape,
    check_room,
    gathered_parts,
    memory_by_phase,
    packed_in_4bit,
    shards_weights,
)
from rlhf_data import UserError, apply_overrides
from rlhf_minmax.config.run import MinMaxConfig, PlayerConfig
from rlhf_minmax.players.past_players import MOST
from rlhf_minmax.players.players import PLAIN, backbone_settings, lora_settings, share_backbone
from rlhf_minmax.run.checks import ModelInfo
from rlhf_minmax.scorers.loading import scorer_hosts, scorer_sections
from rlhf_models import (
    DeviceManager,
    LoraSettings,
    activation_bytes,
    adapter_shapes,
    add_adapters,
    cache_bytes,
    scale_bytes,
    weight_bytes,
)

_COPY_BYTES = 4
"""Per copied parameter, and per parameter of a scorer's adapter: fp32."""
_GUARDED = 3
"""Copies of a player that its guard keeps: the last good one, the measured one and the newest."""
_SUMMED = 1 << 26
"""Numbers of gradients that are added up in one message, see `all_reduce_gradients`."""
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Held:
    """The contents of one device, before they are divided between processes.

    Attributes:
        trained: parameters by player, its critic's included.
        probed: parameters that a best-response probe trains with its own optimizer.
        frozen: bytes of weights that are not trained, the references left out.
        unsharded: bytes of the scales of 4-bit weights, which every process has.
        reference: bytes of references.
        gathered: parts of the models here that are gathered together.
        activations: of the largest pass.
        cache: keys and values of the largest generation.
        copies: parameters that are kept beside the trained ones.
    """

    trained: dict[str, int] = field(default_factory=dict)
    probed: int = 0
    frozen: float = 0.0
    unsharded: float = 0.0
    reference: float = 0.0
    gathered: Gathered = field(default_factory=Gathered)
    activations: float = 0.0
    cache: float = 0.0
    copies: float = 0.0


Phases = dict[str, dict[str, float]]


def estimate_memory(
    config: MinMaxConfig,
    models: dict[str, ModelInfo],
    devices: DeviceManager,
    machine: Machine | None = None,
    *,
    pass_tokens: int,
    cache_tokens: int,
) -> dict[torch.device, Phases]:
    """Bytes of each process by device, phase and part; see `memory_by_phase`.

    - Weights: parameters x bytes of their dtype; quantised linear layers 1 byte (8 bits) or 0.516 (4 bits).
    - Adapters and critics, in fp32, are trained; so are players trained in full, with one frozen reference
      per model. Scorers that are adapters on a player's backbone take 4 bytes a parameter.
    - Gradients: of one player at a time, but under DeepSpeed, which has a place for each.
    - Copies in fp32, on the CPU, of a player's P trained parameters: 3 P for `guards.rollback`, 5 P for
      `diagnostics.cross_play_steps`. Of sharded players each process has its part.
    - Activations of a training pass: see `rlhf_models.memory.activation_bytes`. Keys and values of a
      generation: tokens held at a time x layers x 2 x key-value width.
    - Best-response probes: the larger player's gradients and moments again, and a copy of it on the CPU; with
      `diagnostics.cross_play_steps` also copies of both players where they are.

    Not covered: CUDA's context, Python and its libraries, and what `activation_bytes` leaves out.

    Args:
        config: the run's settings.
        models: what `inspect_models` returned.
        devices: which role runs where.
        machine: the processes and the GPU of each; None is one process of this machine.
        pass_tokens: tokens of the largest training pass.
        cache_tokens: prompt and completion tokens whose keys and values are held at a time.
    """
    machine = machine or Machine()
    held: dict[torch.device, Held] = {}
    planned = _Planned(config, models, devices, machine)
    planned.players(held, pass_tokens, cache_tokens)
    planned.scorers(held)
    return {device: _phases(config, each, device, machine) for device, each in held.items() if each != Held()}


def _phases(config: MinMaxConfig, held: Held, device: torch.device, machine: Machine) -> Phases:
    """A device's memory by phase, for one process."""
    training, total = config.training, sum(held.trained.values())
    hardware = training.hardware()
    moments = float(MOMENT_BYTES[training.optim])
    shape = TrainedShape(total, held.frozen, held.reference, held.gathered, moments, held.unsharded)
    sizes = {"half": False, "activations": held.activations, "cache": held.cache}
    phases = memory_by_phase(hardware, shape, machine, **sizes)
    update = phases["update"]
    if not training.deepspeed and total:
        update["gradients"] *= max(held.trained.values()) / total
    if not training.is_sharded and machine.processes > 1:
        update["buckets of gradients"] = 4.0 * min(_SUMMED, max(held.trained.values(), default=0))
    split = machine.processes if training.is_sharded and shards_weights(hardware) else 1
    for name, parts in phases.items():
        if held.copies and name != "load":
            parts["copies"] = _COPY_BYTES * held.copies / split
        if held.probed and not training.is_sharded and name in ("update", "checkpoint"):
            parts["best-response probes"] = moments * held.probed
            if name == "update":
                parts["best-response probes"] += 4.0 * held.probed
    if device == CPU and not total and not held.frozen:  # copies beside GPUs
        return {name: {"copies": parts["copies"]} for name, parts in phases.items() if "copies" in parts}
    return phases


@dataclass(frozen=True)
class _Planned:
    """A run whose models are laid out on devices; see `estimate_memory`."""

    config: MinMaxConfig
    models: Mapping[str, ModelInfo]
    devices: DeviceManager
    machine: Machine

    def players(self, held: dict[torch.device, Held], pass_tokens: int, cache_tokens: int) -> None:
        """Add the players, with what is remembered of them."""
        config = self.config
        policies = ["policy", PLAIN] if config.baseline else ["policy"]
        players = [("policy", config.policy_model, policies), ("monitor", config.monitor_model, ["monitor"])]
        if share_backbone(config):
            players = [("policy", backbone_settings(config), [*policies, "monitor"])]
        counts: dict[str, int] = {}
        for role, player, names in players:
            device = self.place(role)
            on = held.setdefault(device, Held())
            counts |= self._model(on, player, self.models[role], names, device)
            text = self.models[role].config.get_text_config()
            size = self._dtype(device, player).itemsize
            options: dict[str, Any] = {"checkpointing": player.gradient_checkpointing, "device": device}
            if self.machine.card:
                options["gpu_memory"] = self.machine.memory
            on.activations = max(on.activations, activation_bytes(text, pass_tokens, size, **options))
            on.cache = max(on.cache, cache_bytes(text, cache_tokens, size))
        self._remembered(held, counts)

    def place(self, role: str) -> torch.device:
        """Where a role runs: everything on the GPU of a machine that is not here."""
        return GPU if self.machine.card else self.devices.device(role)

    def _dtype(self, device: torch.device, player: PlayerConfig | None = None) -> torch.dtype:
        """Of a model's weights; GPUs that are named compute in bfloat16."""
        if player is not None and not player.use_lora:
            return torch.float32
        if self.machine.card:
            return torch.bfloat16
        return next(each.dtype for each in self.devices.placements.values() if each.device == device)

    def _model(
        self, on: Held, player: PlayerConfig, info: ModelInfo, names: list[str], device: torch.device
    ) -> dict[str, int]:
        """Add a model and the players on it, adapters or full copies; what each of them trains."""
        bits = 8 if player.load_in_8bit else 4 if player.load_in_4bit else None
        sizes = _sizes(_Shape(info.config), AutoModelForCausalLM, self._dtype(device, player), bits)
        if player.use_lora:
            on.frozen += sizes.weights - sizes.scales
            on.unsharded += sizes.scales
            count = _adapter_size(_Shape(info.config), lora_settings(player).model_dump_json())
        else:
            on.reference += sizes.weights
            count = sizes.count
        on.gathered = on.gathered.union(sizes.gathered)
        on.trained |= dict.fromkeys(names, count)
        return dict.fromkeys(names, count)

    def _remembered(self, held: dict[torch.device, Held], counts: Mapping[str, int]) -> None:
        """Add critics, what guards and cross-play keep, and best-response probes."""
        config, cpu = self.config, held.setdefault(CPU, Held())
        for role, player in (("policy", config.policy_model), ("monitor", config.monitor_model)):
            on = held[self.place("policy" if share_backbone(config) else role)]
            if player.baseline == "critic":
                on.trained[role] += self.models[role].config.get_text_config().hidden_size + 1
        if config.guards.rollback:
            cpu.copies += _GUARDED * (counts["policy"] + counts["monitor"])
        if config.diagnostics.cross_play_steps:
            cpu.copies += MOST * (counts["policy"] + counts["monitor"])
        if config.diagnostics.best_response_updates:
            role = max(("policy", "monitor"), key=lambda role: counts[role])
            held[self.place(role)].probed = counts[role]
            cpu.copies += counts[role]
            if config.diagnostics.cross_play_steps:  # while past players play, the last ones wait
                for each in ("policy", "monitor"):
                    held[self.place(each)].copies += counts[each]

    def scorers(self, held: dict[torch.device, Held]) -> None:
        """Add scorers with a model here: as adapters on a player's backbone, or with their own weights."""
        hosts = scorer_hosts(self.config, self.devices)
        for role, section in scorer_sections(self.config).items():
            if role not in self.models:
                continue
            info, device = self.models[role], self.place(role.removeprefix("held-out "))
            on = held.setdefault(device, Held())
            if role not in hosts:
                causal = getattr(section, "kind", "head") == "prompted"
                auto_class: Any = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
                bits = 8 if section.load_in_8bit else None
                sizes = _sizes(_Shape(info.config), auto_class, self._dtype(device), bits)
                on.frozen += sizes.weights
                on.gathered = on.gathered.union(sizes.gathered)
            if info.adapter is not None:
                shapes = adapter_shapes(info.adapter).values()
                on.frozen += _COPY_BYTES * sum(math.prod(shape) for shape in shapes)


class _Shape:
    """A model's config, equal to another of the same content."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config, self._text = config, config.to_json_string()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shape) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


class _Sizes(NamedTuple):
    """Bytes of a model's weights, its parameters, the parts gathered together, and bytes of scales."""

    weights: float
    count: int
    gathered: Gathered
    scales: float


@lru_cache(maxsize=32)  # a plan tries many settings on the same models
def _sizes(shape: _Shape, auto_class: Any, dtype: torch.dtype, bits: int | None) -> _Sizes:
    with torch.device("meta"):
        model = auto_class.from_config(shape.config, dtype=dtype)
    count = sum(p.numel() for p in model.parameters())
    scales = scale_bytes(model) if bits == 4 else 0.0
    packed = packed_in_4bit(model, 4) if bits == 4 else None
    return _Sizes(weight_bytes(model, bits=bits), count, gathered_parts(model, packed), scales)


@lru_cache(maxsize=8)
def _adapter_size(shape: _Shape, settings: str) -> int:
    """Parameters of an adapter, whose settings are given as JSON."""
    lora = LoraSettings.model_validate_json(settings)
    with torch.device("meta"):
        adapted = add_adapters(AutoModelForCausalLM.from_config(shape.config), ["one"], lora)
    return sum(p.numel() for name, p in adapted.named_parameters() if ".lora_" in name)


_LESS_MEMORY: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": True},
    {"training.fsdp": True},
    {"training.fsdp": True, "gradient_checkpointing": True},
    {"training.fsdp": True, "gradient_checkpointing": True, "training.fsdp_cpu_offload": True},
    {"use_lora": True},
    {"use_lora": True, "gradient_checkpointing": True},
    {"use_lora": True, "load_in_4bit": True},
    {"use_lora": True, "load_in_4bit": True, "gradient_checkpointing": True},
    {"use_lora": True, "training.fsdp": True, "gradient_checkpointing": True},
)
"""Changes of settings that save memory, of both players where no section is named."""
_SPREAD = {"training.fsdp": True, "training.deepspeed": None, "gradient_checkpointing": True}
"""Changes with which more processes need less memory each."""


def check_game_fits(
    config: MinMaxConfig, plan: Callable[[MinMaxConfig, Machine], float], machine: Machine
) -> None:
    """Refuse a run that the machine's GPUs cannot hold, with the nearest settings that they can.

    Args:
        config: the run's settings.
        plan: bytes of each process at its peak.
        machine: what is planned for.

    Raises:
        UserError: they cannot.
    """

    def needs(changes: Mapping[str, Any], machine: Machine) -> float | None:
        shards = "training.fsdp" in changes
        if shards and (machine.processes == 1 or (config.training.deepspeed and changes != spread)):
            return None
        overrides = [
            f"{key}={'null' if value is None else str(value).lower()}" for key, value in changes.items()
        ]
        try:
            other = MinMaxConfig.from_dict(apply_overrides(config.to_dict(), overrides))
        except UserError:
            return None  # it does not go with another setting
        return plan(other, machine)

    alternatives = [_of_both_players(changes) for changes in _LESS_MEMORY]
    spread = _of_both_players(_SPREAD)
    check_room(needs, machine, alternatives=alternatives, spread=spread)


def _of_both_players(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes with their sections."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        sections = ("",) if "." in key else ("policy_model.", "monitor_model.")
        found |= dict.fromkeys((f"{section}{key}" for section in sections), value)
    return found
