"""Runs of several processes: devices of each, and requirements on the settings."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_algos import Machine, check_hardware, check_same_on_all, job_device, shards_weights
from rlhf_algos.process_group import world_size
from rlhf_data import UserError
from rlhf_minmax.config.run import MinMaxConfig, PlayerConfig
from rlhf_minmax.demo.builder import demo_folder, judge_folder
from rlhf_minmax.demo.held_out import held_out_folder
from rlhf_minmax.game.stories import Stories
from rlhf_minmax.scorers.loading import needs_held_out_reward, scorer_sections
from rlhf_models import DeviceManager
from rlhf_models.device_manager import ROLES


def plan_devices(config: MinMaxConfig, machine: Machine | None = None) -> DeviceManager:
    """Devices of all roles: each of several processes has its own GPU for all roles.

    Args:
        config: the run's settings.
        machine: what a dry run plans for; None is this machine with the processes that torchrun started.
    """
    loaded = {"policy", "monitor", *(role.removeprefix("held-out ") for role in scorer_sections(config))}
    unused = set(ROLES) - loaded
    if (machine.processes if machine else world_size()) == 1 and not (machine and machine.card):
        return DeviceManager(config.devices, unused=unused)
    if config.devices:
        raise UserError(
            "devices names a device per role, but under torchrun every process runs all roles on its own; "
            "leave devices out, or put the judge behind an API"
        )
    return DeviceManager(dict.fromkeys(ROLES, str(job_device())), unused=unused)


def check_processes(config: MinMaxConfig, processes: int | None = None) -> None:
    """Refuse settings that FSDP and DeepSpeed do not support, and FSDP in a single process.

    Args:
        config: the run's settings.
        processes: how many the run is planned for; None for those that torchrun started.
    """
    processes = processes or world_size()
    training = config.training
    if not training.is_sharded:
        return
    check_hardware(training.hardware(), job_device(), torch.float32, world_size=processes)
    sharding = "training.fsdp" if training.fsdp else "training.deepspeed"
    whole = ["debug_gradient_flow"] if training.debug_gradient_flow else []
    whole += ["load_best_model_at_end"] if training.load_best_model_at_end else []
    whole += [f"optim {training.optim}"] if training.optim != "adamw_torch" else []
    if whole:
        raise UserError(
            f"training.{' and '.join(whole)} does not go with {sharding}, which shards what they need "
            "whole; leave one of them out",
            code="cannot_be_sharded",
            key=whole[0].split()[0],
        )
    if training.fsdp or (processes > 1 and shards_weights(training.hardware())):
        _check_quantised(config, sharding)


def check_inputs(config: MinMaxConfig) -> None:
    """Refuse models, rows and rules that differ between machines; every process must call it.

    Raises:
        UserError: processes see different ones, or some see none.
    """
    sections, data = {**_players(config), **scorer_sections(config)}, config.data
    named = [getattr(section, "model_name", None) for section in sections.values()]
    named += [data.train_data, data.eval_data, (data.rules or "").rpartition(":")[0]]
    check_same_on_all(*filter(None, named))


def _check_quantised(config: MinMaxConfig, sharding: str) -> None:
    """Refuse models in 8 bits whose weights would be sharded."""
    sections = {**_players(config), **scorer_sections(config)}
    for name, section in sections.items():
        if section.load_in_8bit:
            raise UserError(
                f"the {name.removesuffix('_model')} model is in 8 bits, and {sharding} shards no 8-bit "
                "weights; leave out load_in_8bit (players can have load_in_4bit), or take ZeRO-2, with which "
                "each process holds the quantised model",
                code="quantised_and_sharded",
            )


def _players(config: MinMaxConfig) -> dict[str, PlayerConfig]:
    return {"policy_model": config.policy_model, "monitor_model": config.monitor_model}


def check_built(
    config: MinMaxConfig, stories: Stories, cache_folder: Path | None = None, *, processes: int | None = None
) -> None:
    """Refuse to build the demonstration's models in several processes.

    Args:
        config: settings of the run.
        stories: its stories.
        cache_folder: where built models are kept; None is the user's cache folder.
        processes: their planned number; None counts those that run.

    Raises:
        UserError: there are several, and the models are not built.
    """
    if (processes or world_size()) == 1:
        return
    folder = demo_folder(
        stories.building, stories.prompts, config.demo_settings(), seed=config.seed, cache_folder=cache_folder
    )
    needed = [folder]
    needed += [held_out_folder(folder)] if needs_held_out_reward(config) else []
    needed += [judge_folder(folder, stories.judged)] if stories.judged is not None else []
    if not all(each.is_dir() for each in needed):
        raise UserError(
            "the demonstration's models are not built yet, and one process builds them; start the same run "
            "once with --eval-only in one process, without torchrun and distributed.trainer_workers, then "
            "again",
            code="not_built",
        )
