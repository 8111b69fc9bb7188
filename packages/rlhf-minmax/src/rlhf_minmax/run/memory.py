"""How much memory a run will need, estimated from the shapes of its models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from rlhf_algos import MOMENT_BYTES
from rlhf_algos.process_group import world_size
from rlhf_minmax.config.run import MinMaxConfig, PlayerConfig
from rlhf_minmax.optim.gradient_step import zero_stage
from rlhf_minmax.players.players import PLAIN, backbone_settings, lora_settings, share_backbone
from rlhf_minmax.run.checks import ModelInfo
from rlhf_minmax.scorers.loading import scorer_hosts, scorer_sections
from rlhf_models import (
    DeviceManager,
    activation_bytes,
    adapter_shapes,
    add_adapters,
    memory_text,
    weight_bytes,
)

_WEIGHT_BYTES = 4
"""Per parameter of an adapter or a critic: fp32."""
_COPY_BYTES = 4
"""Per copied parameter, gradient or average, and per parameter of a scorer's adapter: fp32."""
_GUARDED = 3
"""Copies of the monitor that its guard keeps: the last good one, the measured one and the newest."""
_STEP_COPIES = {"plain": 0, "optimistic": 2}
"""What a step keeps: the gradients of this step and the one before."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one role, or several roles on one backbone, need on their device.

    Args:
        device: where.
        weights: parameters, frozen ones, adapters, critics and references included.
        training: gradients and Adam moments.
        activations: what one forward and backward pass keeps, or one generation's keys and values.
        copies: of trained parameters or their gradients, that guard, pools, averages and steps keep.
    """

    device: torch.device
    weights: float
    training: float = 0.0
    activations: float = 0.0
    copies: float = 0.0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.weights + self.training + self.activations + self.copies

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients and moments": self.training}
        return memory_text(parts | {"activations": self.activations, "copies": self.copies})


def estimate_memory(
    config: MinMaxConfig,
    models: dict[str, ModelInfo],
    devices: DeviceManager,
    *,
    pass_tokens: int,
    cache_tokens: int,
) -> list[Memory]:
    """Memory by device: weights + gradients and moments + the largest of all activations there.

    - Weights: parameters x bytes of their dtype; quantised linear layers 1 byte (8 bits) or 0.516 (4 bits).
    - Adapters: 4 bytes a parameter, fp32, and `state_bytes`. Full training, in fp32: `state_bytes` per
      player, and one frozen reference per model. Critics: as adapters, hidden + 1 parameters.
    - Scorers that are adapters on a player's backbone: 4 bytes a parameter, and no weights of their own.
    - Copies in fp32 of a player's P trained parameters: P for an average, P for extragradient steps, 2 P
      for optimistic ones; on the CPU 3 P of the monitor for `guards.rollback`, and `pool.size` times P of
      both players for the pools.
    - Activations of a training pass: see `rlhf_models.memory.activation_bytes`.
    - Keys and values of a generation: tokens held at a time x layers x 2 x key-value width.

    - Best-response probes: the larger player's `state_bytes` again, and a copy of it on the CPU.

    Not covered: CUDA's context, Python and its libraries, and what `activation_bytes` leaves out.

    Args:
        config: the run's settings.
        models: what `inspect_models` found.
        devices: which role runs where.
        pass_tokens: tokens of the largest training pass.
        cache_tokens: prompt and completion tokens whose keys and values are held at a time.
    """
    training = config.training
    sharding = "fsdp" if training.fsdp else None
    if training.deepspeed is not None:
        sharding = zero_stage(training.deepspeed)
    state = state_bytes(sharding, world_size(), moments=MOMENT_BYTES[training.optim])
    policies = ["policy", PLAIN] if config.baseline else ["policy"]
    players = [("policy", config.policy_model, policies), ("monitor", config.monitor_model, ["monitor"])]
    if share_backbone(config):
        players = [("policy", backbone_settings(config), [*policies, "monitor"])]
    parts: list[Memory] = []
    counts: dict[str, int] = {}
    for role, player, names in players:
        place = (devices.device(role), devices.dtype(role))
        tokens = {"pass_tokens": pass_tokens, "cache_tokens": cache_tokens}
        part, count = _trained(player, models[role], names, place, state=state, **tokens)
        parts.append(part)
        counts |= dict.fromkeys(names, count)
    for role, player in (("policy", config.policy_model), ("monitor", config.monitor_model)):
        part = _remembered(player, models[role], counts[role], devices.device(role), state)
        ahead = _COPY_BYTES * counts[role] if config.schedule.extragradient else 0
        parts.append(replace(part, copies=part.copies + ahead))
    if config.diagnostics.best_response_updates:
        parts += _probed(counts, devices, state)
    return _by_device([*parts, _copies_on_cpu(config, counts), *_scorers(config, models, devices)])


def state_bytes(sharding: int | str | None, processes: int, *, moments: float = 8.0) -> float:
    """Bytes per trained parameter of a process beside the weight, all fp32 but for 8-bit moments.

    A gradient and two Adam moments, 12. FSDP shards them and a copy of the weights, 16. DeepSpeed keeps a
    copy of the weights besides and shards, by its stage (ZeRO, arXiv:1910.02054), 1: moments and copy, 2:
    gradients too, 3: the trained weights too. With FSDP and stage 3 the player itself stays whole.

    Args:
        sharding: the stage of ZeRO, `fsdp`, or None.
        processes: among which is sharded.
        moments: bytes of both Adam moments where nothing is sharded.
    """
    if sharding is None:
        return 4.0 + moments
    shares = {1: (4.0, 12.0), 2: (0.0, 16.0), 3: (0.0, 20.0), "fsdp": (0.0, 16.0)}
    whole, sharded = shares.get(sharding, (16.0, 0.0))
    return whole + sharded / processes


def _by_device(parts: Sequence[Memory]) -> list[Memory]:
    total: dict[torch.device, Memory] = {}
    for part in parts:
        before = total.get(part.device, Memory(part.device, 0.0))
        total[part.device] = Memory(
            part.device,
            before.weights + part.weights,
            before.training + part.training,
            max(before.activations, part.activations),
            before.copies + part.copies,
        )
    return [part for part in total.values() if part.total]


def _trained(
    player: PlayerConfig,
    info: ModelInfo,
    names: list[str],
    placement: tuple[torch.device, torch.dtype],
    *,
    state: float,
    pass_tokens: int,
    cache_tokens: int,
) -> tuple[Memory, int]:
    """One loaded model and the players on it, adapters or full copies; and how much each of them trains."""
    device, dtype = placement
    if not player.use_lora:
        dtype = torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(info.config, dtype=dtype)
        weights = weight_bytes(model, bits=8 if player.load_in_8bit else 4 if player.load_in_4bit else None)
        if player.use_lora:
            adapted = add_adapters(model, names, lora_settings(player))
            count = sum(p.numel() for name, p in adapted.named_parameters() if ".lora_" in name) // len(names)
            weights += _WEIGHT_BYTES * count * len(names)
        else:
            count = sum(p.numel() for p in model.parameters())
            weights *= len(names) + 1
    text = info.config.get_text_config()
    training_pass = activation_bytes(
        text, pass_tokens, dtype.itemsize, checkpointing=player.gradient_checkpointing
    )
    cache = _cache_bytes(text, cache_tokens, dtype.itemsize)
    return Memory(device, weights, state * count * len(names), max(training_pass, cache)), count


def _remembered(
    player: PlayerConfig, info: ModelInfo, count: int, device: torch.device, state: float
) -> Memory:
    """What a player that trains `count` parameters keeps besides: critic, step rule, average."""
    hidden = info.config.get_text_config().hidden_size
    critic = hidden + 1 if player.baseline == "critic" else 0
    copies = _STEP_COPIES[player.step_rule] + (player.average_decay is not None)
    return Memory(device, _WEIGHT_BYTES * critic, state * critic, copies=_COPY_BYTES * count * copies)


def _probed(counts: Mapping[str, int], devices: DeviceManager, state: float) -> list[Memory]:
    """The optimizer of a best-response probe, which trains one player at a time, and the player as it was."""
    role = max(("policy", "monitor"), key=lambda role: counts[role])
    copy = Memory(torch.device("cpu"), 0.0, copies=_COPY_BYTES * counts[role])
    return [Memory(devices.device(role), 0.0, state * counts[role]), copy]


def _copies_on_cpu(config: MinMaxConfig, counts: Mapping[str, int]) -> Memory:
    """Past players: the guard's monitors, and both pools when they are full."""
    guarded = _GUARDED * counts["monitor"] if config.guards.rollback else 0
    pooled = config.pool.size * (counts["policy"] + counts["monitor"]) if config.pool.every else 0
    return Memory(torch.device("cpu"), 0.0, copies=_COPY_BYTES * (guarded + pooled))


def _scorers(config: MinMaxConfig, models: dict[str, ModelInfo], devices: DeviceManager) -> list[Memory]:
    """Scorers with a model here: as adapters on a player's backbone, or with weights of their own."""
    hosts, parts = scorer_hosts(config, devices), []
    for role, section in scorer_sections(config).items():
        if role not in models:
            continue
        info, on = models[role], role.removeprefix("held-out ")
        weights = 0.0
        if role not in hosts:
            causal = getattr(section, "kind", "head") == "prompted"
            auto_class: Any = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
            with torch.device("meta"):
                model = auto_class.from_config(info.config, dtype=devices.dtype(on))
            weights = weight_bytes(model, bits=8 if section.load_in_8bit else None)
        if info.adapter is not None:
            shapes = adapter_shapes(info.adapter).values()
            weights += _COPY_BYTES * sum(math.prod(shape) for shape in shapes)
        parts.append(Memory(devices.device(on), weights))
    return parts


def _cache_bytes(config: PreTrainedConfig, tokens: int, itemsize: int) -> float:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2.0 * tokens * config.num_hidden_layers * heads * head_dim * itemsize
