"""How much memory a run will need, estimated from the shapes of its models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from rlhf_minmax.checks import ModelInfo
from rlhf_minmax.config import MinMaxConfig, PlayerConfig
from rlhf_minmax.players import PLAIN, backbone_settings, lora_settings, share_backbone
from rlhf_minmax.scorers import scorer_sections
from rlhf_models import DeviceManager, add_adapters
from rlhf_models.memory import activation_bytes, weight_bytes

_ADAPTER_BYTES = 16
"""Per adapter parameter: fp32 weight, gradient and two Adam moments."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one role, or several roles on one backbone, need on their device.

    Args:
        device: where.
        weights: parameters, frozen ones and references included.
        training: gradients and Adam moments, and the adapters themselves.
        activations: what one forward and backward pass keeps, or one generation's keys and values.
    """

    device: torch.device
    weights: float
    training: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.weights + self.training + self.activations


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
    - Adapters: 16 bytes a parameter (fp32 weight, gradient, two moments). Full training, in fp32: a gradient
      and two moments per player, and one frozen reference per model.
    - Activations of a training pass: see `rlhf_models.memory.activation_bytes`.
    - Keys and values of a generation: tokens held at a time x layers x 2 x key-value width.

    Not covered: CUDA's context, Python and its libraries, and what `activation_bytes` leaves out.

    Args:
        config: the run's settings.
        models: what `inspect_models` found.
        devices: which role runs where.
        pass_tokens: tokens of the largest training pass.
        cache_tokens: prompt and completion tokens whose keys and values are held at a time.
    """
    parts = []
    policies = ["policy", PLAIN] if config.baseline else ["policy"]
    players = [("policy", config.policy_model, policies), ("monitor", config.monitor_model, ["monitor"])]
    if share_backbone(config):
        players = [("policy", backbone_settings(config), [*policies, "monitor"])]
    for role, player, names in players:
        place = (devices.device(role), devices.dtype(role))
        tokens = {"pass_tokens": pass_tokens, "cache_tokens": cache_tokens}
        parts.append(_trained(player, models[role], names, place, **tokens))
    for role, section in scorer_sections(config).items():
        if role in models:
            causal = getattr(section, "kind", "head") == "prompted"
            on = role.removeprefix("held-out ")
            place = (devices.device(on), devices.dtype(on))
            bits = 8 if section.load_in_8bit else None
            parts.append(_scorer(models[role], place, causal=causal, bits=bits))
    return _by_device(parts)


def _by_device(parts: Sequence[Memory]) -> list[Memory]:
    total: dict[torch.device, Memory] = {}
    for part in parts:
        before = total.get(part.device, Memory(part.device, 0.0))
        total[part.device] = Memory(
            part.device,
            before.weights + part.weights,
            before.training + part.training,
            max(before.activations, part.activations),
        )
    return list(total.values())


def _trained(
    player: PlayerConfig,
    info: ModelInfo,
    names: list[str],
    placement: tuple[torch.device, torch.dtype],
    *,
    pass_tokens: int,
    cache_tokens: int,
) -> Memory:
    """One loaded model and the players on it: adapters of it, or full copies with one reference."""
    device, dtype = placement
    if not player.use_lora:
        dtype = torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(info.config, dtype=dtype)
        weights = weight_bytes(model, bits=8 if player.load_in_8bit else 4 if player.load_in_4bit else None)
        if player.use_lora:
            adapted = add_adapters(model, names, lora_settings(player))
            count = sum(p.numel() for name, p in adapted.named_parameters() if ".lora_" in name)
            training = float(_ADAPTER_BYTES * count)
        else:
            training = 3.0 * weights * len(names)
            weights *= len(names) + 1
    text = info.config.get_text_config()
    training_pass = activation_bytes(
        text, pass_tokens, dtype.itemsize, checkpointing=player.gradient_checkpointing
    )
    return Memory(
        device, weights, training, max(training_pass, _cache_bytes(text, cache_tokens, dtype.itemsize))
    )


def _scorer(
    info: ModelInfo, placement: tuple[torch.device, torch.dtype], *, causal: bool, bits: int | None
) -> Memory:
    device, dtype = placement
    auto_class: Any = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    with torch.device("meta"):
        return Memory(device, weight_bytes(auto_class.from_config(info.config, dtype=dtype), bits=bits))


def _cache_bytes(config: PreTrainedConfig, tokens: int, itemsize: int) -> float:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2.0 * tokens * config.num_hidden_layers * heads * head_dim * itemsize
