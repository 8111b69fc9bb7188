"""The two players, and the extra policies that baselines train."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_data import UserError
from rlhf_minmax.config.run import MinMaxConfig, PlayerConfig
from rlhf_models import (
    AdapterSet,
    DeviceManager,
    LoraSettings,
    PolicyModel,
    add_adapters,
    disable_dropout,
    load_causal_lm,
    load_tokenizer,
)

PLAIN = "plain"
"""Name of the baseline's policy."""


@dataclass(frozen=True)
class Players:
    """Policy and monitor, and the policy of the plain baseline, which starts as the same model.

    Args:
        policy: the player that answers.
        monitor: the player that criticises.
        plain: the policy that is trained on the reward model alone; None if no baseline is wanted.
        shared: whether all are adapters of one backbone.
    """

    policy: PolicyModel
    monitor: PolicyModel
    plain: PolicyModel | None
    shared: bool


def load_players(
    config: MinMaxConfig, demo_base: str | None, devices: DeviceManager, *, sharded: bool = False
) -> Players:
    """Load the players: one backbone with an adapter each where the names agree, else two models.

    Args:
        config: the run's settings.
        demo_base: folder of the demonstration's base, for players without a model name.
        devices: which role runs where.
        sharded: see `load_causal_lm`.
    """
    check_players(config, devices)
    policy_name = config.policy_model.model_name or demo_base
    monitor_name = config.monitor_model.model_name or demo_base
    policies = ["policy", PLAIN] if config.baseline else ["policy"]
    if share_backbone(config):
        backbone = backbone_settings(config)
        roles = ["policy", "monitor", *policies[1:]]  # in this order a baseline changes no other player
        players = _load(backbone, policy_name, roles, devices, config.seed, sharded=sharded)
        return Players(players["policy"], players["monitor"], players.get(PLAIN), shared=True)
    players = _load(config.policy_model, policy_name, policies, devices, config.seed, sharded=sharded)
    monitors = _load(config.monitor_model, monitor_name, ["monitor"], devices, config.seed, sharded=sharded)
    return Players(players["policy"], monitors["monitor"], players.get(PLAIN), shared=False)


def share_backbone(config: MinMaxConfig) -> bool:
    """Whether both players are adapters of one backbone: the same model, and LoRA for both."""
    policy, monitor = config.policy_model, config.monitor_model
    return policy.model_name == monitor.model_name and policy.use_lora and monitor.use_lora


def backbone_settings(config: MinMaxConfig) -> PlayerConfig:
    """How a shared backbone is loaded: quantised and checkpointed where either player asks for it."""
    flags = ("load_in_8bit", "load_in_4bit", "gradient_checkpointing")
    policy, monitor = config.policy_model, config.monitor_model
    return policy.model_copy(update={flag: getattr(policy, flag) or getattr(monitor, flag) for flag in flags})


def check_players(config: MinMaxConfig, devices: DeviceManager) -> None:
    """Check that players on one backbone agree on what they share."""
    if not share_backbone(config):
        return
    settings = backbone_settings(config)
    if settings.load_in_8bit and settings.load_in_4bit:
        raise UserError(
            "policy_model and monitor_model are adapters of one backbone; one asks for load_in_8bit, the "
            "other for load_in_4bit; choose one or name two models"
        )
    if lora_settings(config.policy_model) != lora_settings(config.monitor_model):
        raise UserError(
            "policy_model and monitor_model name the same model, so they are adapters of one backbone and "
            "need equal lora_r, lora_alpha, lora_dropout and lora_target_modules; "
            "make them equal or name two models",
            code="different_adapters",
        )
    if devices.device("policy") != devices.device("monitor"):
        raise UserError(
            f"policy and monitor are adapters of one backbone but are sent to {devices.device('policy')} and "
            f"{devices.device('monitor')}; give both one device or name two models",
            code="different_devices",
        )


def lora_settings(config: PlayerConfig) -> LoraSettings:
    """The adapter settings of a player."""
    return LoraSettings(
        lora_r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        lora_target_modules=config.lora_target_modules,
    )


def _load(
    config: PlayerConfig,
    name: str | None,
    roles: list[str],
    devices: DeviceManager,
    seed: int,
    *,
    sharded: bool,
) -> dict[str, PolicyModel]:
    """Load one model as several players: adapters of one backbone, or full copies."""
    assert name is not None, "players without a model name need the demonstration's base"
    model: Any = load_causal_lm(
        name,
        dtype=devices.dtype(roles[0]) if config.use_lora else torch.float32,
        load_in_8bit=config.load_in_8bit,
        load_in_4bit=config.load_in_4bit,
        device=devices.device(roles[0]),
        gradient_checkpointing=config.gradient_checkpointing,
        sharded=sharded,
    )
    disable_dropout(model)
    tokenizer = load_tokenizer(name)
    if config.use_lora:
        adapters = AdapterSet(add_adapters(model, roles, lora_settings(config), seed=seed))
        return {role: PolicyModel(None, tokenizer, adapters=adapters, adapter=role) for role in roles}
    trained = {role: copy.deepcopy(model) for role in roles}
    reference = model.requires_grad_(False)
    return {role: PolicyModel(trained[role], tokenizer, reference=reference) for role in roles}
