"""A run in several processes: where each computes, and what it asks of the settings."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_algos import HardwareConfig, check_hardware, job_device
from rlhf_algos.process_group import world_size
from rlhf_data import UserError
from rlhf_minmax.config.run import MinMaxConfig, PlayerConfig
from rlhf_minmax.demo.builder import demo_folder
from rlhf_minmax.demo.held_out import held_out_folder
from rlhf_minmax.game.stories import Stories
from rlhf_minmax.optim.gradient_step import SHARDED_WEIGHTS, zero_stage
from rlhf_minmax.scorers.loading import needs_held_out_reward
from rlhf_models import DeviceManager
from rlhf_models.device_manager import ROLES


def plan_devices(config: MinMaxConfig) -> DeviceManager:
    """Where every role runs: of several processes each has a GPU of its own for all roles.

    Raises:
        UserError: a device does not exist, or devices are named for several processes.
    """
    if world_size() == 1:
        return DeviceManager(config.devices)
    if config.devices:
        raise UserError(
            "devices names a device per role, but under torchrun every process runs all roles on its own; "
            "leave devices out, or put the judge behind an API"
        )
    return DeviceManager(dict.fromkeys(ROLES, str(job_device())))


def check_processes(config: MinMaxConfig) -> None:
    """Refuse what FSDP and DeepSpeed cannot do, and FSDP in a single process.

    Raises:
        UserError: which setting, and what to do.
    """
    training = config.training
    if training.fsdp:
        hardware = HardwareConfig(fsdp=True, bf16=False)
        check_hardware(hardware, job_device(), torch.float32, world_size=world_size())
    if not (training.fsdp or training.deepspeed):
        return
    sharding = "training.fsdp" if training.fsdp else "training.deepspeed"
    if config.schedule.extragradient:
        raise UserError(
            f"schedule.extragradient puts weights back to where a step began, which {sharding} shards; set "
            f"it false or leave {sharding} out",
            code="cannot_be_sharded",
            key="extragradient",
        )
    whole = ["debug_gradient_flow"] if training.debug_gradient_flow else []
    whole += ["load_best_model_at_end"] if training.load_best_model_at_end else []
    whole += ["optim adamw_bnb_8bit"] if training.optim == "adamw_bnb_8bit" else []
    if whole:
        raise UserError(
            f"training.{' and '.join(whole)} cannot be had with {sharding}, which shards what they need "
            "whole; leave one of them out",
            code="cannot_be_sharded",
            key=whole[0].split()[0],
        )
    for name, player in _players(config).items():
        if player.step_rule != "plain":
            raise UserError(
                f"{name}.step_rule {player.step_rule} needs whole gradients, which {sharding} shards; take "
                f"step_rule plain or leave {sharding} out",
                code="cannot_be_sharded",
                key="step_rule",
            )
    if training.deepspeed and zero_stage(training.deepspeed) == SHARDED_WEIGHTS:
        _check_whole_weights(config, training.deepspeed)


def _players(config: MinMaxConfig) -> dict[str, PlayerConfig]:
    return {"policy_model": config.policy_model, "monitor_model": config.monitor_model}


def _check_whole_weights(config: MinMaxConfig, path: str) -> None:
    """Refuse what needs weights whole, which ZeRO-3 shards."""
    for name, player in _players(config).items():
        if player.use_lora:
            raise UserError(
                f"{path} shards weights (ZeRO-3), but {name} trains an adapter on frozen weights that every "
                "process samples with; take stage 2, or use_lora false"
            )
    if config.guards.rollback:
        raise UserError(
            f"guards.rollback puts weights back, which {path} shards (ZeRO-3); take stage 2 or no rollback"
        )


def check_built(config: MinMaxConfig, stories: Stories, cache_folder: Path | None = None) -> None:
    """Refuse to build the demonstration's models in several processes.

    Raises:
        UserError: there are several, and a model is missing.
    """
    if world_size() == 1:
        return
    folder = demo_folder(
        stories.building, stories.prompts, config.demo_settings(), seed=config.seed, cache_folder=cache_folder
    )
    if not folder.is_dir() or (needs_held_out_reward(config) and not held_out_folder(folder).is_dir()):
        raise UserError(
            "the demonstration's models are not built yet, and one process builds them; start the same run "
            "once without torchrun, with --eval-only, then with it"
        )
