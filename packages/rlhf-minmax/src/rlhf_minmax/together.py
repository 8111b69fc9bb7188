"""A run in several processes: where each computes, and how they share scoring out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_algos.jobs.models import job_device
from rlhf_algos.process_group import (
    from_first_process,
    gathered,
    is_first_process,
    num_processes,
    own_part,
)
from rlhf_data import UserError
from rlhf_minmax.config import MinMaxConfig
from rlhf_minmax.data import Stories
from rlhf_minmax.demo import demo_folder
from rlhf_minmax.demo_held_out import held_out_folder
from rlhf_minmax.scorer_config import JudgeConfig
from rlhf_minmax.scorers import HeldOut, needs_held_out_reward
from rlhf_minmax.stepping import SHARDED_WEIGHTS, zero_stage
from rlhf_models import DeviceManager
from rlhf_models.device_manager import ROLES


class ScoredInParts:
    """A reward model or a judge of which every process scores a part, and gets all scores.

    Args:
        scorer: has `score(*columns, **options)`, columns being equally long; the same on every process.
    """

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer

    def score(self, *columns: Sequence[Any], **options: Any) -> Tensor:
        """(B,) the scorer's scores of B rows; every process must call it with the same."""
        own = [own_part(column) for column in columns]
        scores = self.scorer.score(*own, **options).tolist() if own[0] else []
        return torch.tensor(gathered(scores))


class ScoredByFirst:
    """A judge behind an API, which the first process asks for all, so that its limits are kept.

    Args:
        scorer: see `ScoredInParts`.
    """

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer

    def score(self, *columns: Sequence[Any], **options: Any) -> Tensor:
        """(B,) the scorer's scores of B rows; every process must call it."""
        scores = self.scorer.score(*columns, **options).tolist() if is_first_process() else None
        return torch.tensor(from_first_process(scores))


def shared_out(scorer: Any, config: JudgeConfig | None = None) -> Any:
    """A scorer as all processes use it together; in a single process as it is.

    Args:
        scorer: a reward model or a judge.
        config: of a judge; None for a reward model.
    """
    if num_processes() == 1:
        return scorer
    return ScoredByFirst(scorer) if config and config.kind == "api" else ScoredInParts(scorer)


def held_out_together(held_out: HeldOut, config: JudgeConfig | None) -> HeldOut:
    """Held-out scorers as all processes use them together; `config` is the judge's."""
    reward, judge = held_out.reward_model, held_out.judge
    return HeldOut(
        None if reward is None else shared_out(reward),
        None if judge is None else shared_out(judge, config),
        held_out.reward_scale,
        held_out.judge_scale,
    )


def plan_devices(config: MinMaxConfig) -> DeviceManager:
    """Where every role runs: of several processes each has a GPU of its own for all roles.

    Raises:
        UserError: a device does not exist, or devices are named for several processes.
    """
    if num_processes() == 1:
        return DeviceManager(config.devices)
    if config.devices:
        raise UserError(
            "devices names a device per role, but under torchrun every process runs all roles on its own; "
            "leave devices out, or put the judge behind an API"
        )
    return DeviceManager(dict.fromkeys(ROLES, str(job_device())))


def check_processes(config: MinMaxConfig) -> None:
    """Refuse what several processes, or DeepSpeed, cannot do.

    Raises:
        UserError: which setting, and what to do.
    """
    path = config.training.deepspeed
    if path is None:
        return
    if config.schedule.extragradient:
        raise UserError(
            "schedule.extragradient puts weights back to where a step began, whose copies training.deepspeed "
            "keeps to itself; set it false or leave deepspeed out"
        )
    stage = zero_stage(path)
    players = {"policy_model": config.policy_model, "monitor_model": config.monitor_model}
    for name, player in players.items():
        if player.step_rule != "plain":
            raise UserError(
                f"{name}.step_rule {player.step_rule} needs whole gradients, which training.deepspeed "
                "shards; take step_rule plain or leave deepspeed out"
            )
        if stage == SHARDED_WEIGHTS and player.use_lora:
            raise UserError(
                f"{path} shards weights (ZeRO-3), but {name} trains an adapter on frozen weights that every "
                "process samples with; take stage 2, or use_lora false"
            )
    if stage == SHARDED_WEIGHTS and config.guards.rollback:
        raise UserError(
            f"guards.rollback puts weights back, which {path} shards (ZeRO-3); take stage 2 or no rollback"
        )


def check_built(config: MinMaxConfig, stories: Stories, cache_folder: Path | None = None) -> None:
    """Refuse to build the demonstration's models in several processes.

    Raises:
        UserError: there are several, and a model is missing.
    """
    if num_processes() == 1:
        return
    folder = demo_folder(
        stories.building, stories.prompts, config.demo_settings(), seed=config.seed, cache_folder=cache_folder
    )
    if not folder.is_dir() or (needs_held_out_reward(config) and not held_out_folder(folder).is_dir()):
        raise UserError(
            "the demonstration's models are not built yet, and one process builds them; start the same run "
            "once without torchrun, with --eval-only, then with it"
        )
