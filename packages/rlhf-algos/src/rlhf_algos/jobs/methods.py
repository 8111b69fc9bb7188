"""The methods of training: what each is made of.  `METHODS` has one entry per method."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from rlhf_algos.configs.offline import (
    DPOConfig,
    KTOConfig,
    PRMConfig,
    RewardConfig,
    SFTConfig,
    SimPOConfig,
)
from rlhf_algos.configs.online import GRPOConfig, PPOConfig
from rlhf_algos.configs.trainer import TrainerConfig
from rlhf_algos.jobs.config import TASK_REWARDS, ModelKind, job_config

if TYPE_CHECKING:
    from rlhf_algos.engine.base_trainer import BaseTrainer

__all__ = ["METHODS", "Method"]

_TINY_ONLINE: Mapping[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "max_completion_length": 16,
    "per_device_train_batch_size": 256,
}
_TINY_PPO: Mapping[str, Any] = {
    **_TINY_ONLINE,
    "per_device_train_batch_size": 128,
    "num_generations": 4,
    "num_ppo_epochs": 2,
    "vf_coef": 0.5,
}
_TINY: Mapping[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "adam_beta2": 0.95,
    "per_device_train_batch_size": 32,
}


@dataclass(frozen=True)
class Method:
    """A way to train: its settings, its trainer, the rows it reads and the model it trains.

    Args:
        config: the class of its settings.
        trainer: a subclass of `BaseTrainer`, or its name in `rlhf_algos`, which is imported when it is needed
            (it loads torch).
        records: name of the record kind that rows become, see `rlhf_data.load_records`.
        model: what is trained: a language model, or one with a scalar head that scores texts or steps.
        overlong: whether rows of more than `max_length` tokens are cut or left out.
        tiny: settings that suit the tiny model that is built where none is given; they stand above the
            config's defaults and below everything that is set.
        story_epochs: passes over the rows of the story world, unless set.
    """

    config: type[TrainerConfig]
    trainer: type[BaseTrainer[Any]] | str
    records: str
    model: ModelKind = "policy"
    overlong: Literal["truncate", "drop"] = "truncate"
    tiny: Mapping[str, Any] = field(default_factory=lambda: _TINY)
    story_epochs: float = 3.0

    @property
    def trainer_class(self) -> Any:
        """The class of its trainer."""
        if isinstance(self.trainer, str):
            return getattr(importlib.import_module("rlhf_algos"), self.trainer)
        return self.trainer

    @property
    def online(self) -> bool:
        """Whether it trains on the model's own completions."""
        return self.records == "prompt"

    @cached_property
    def job_config(self) -> Any:
        """The class of a whole job's settings: the method's, the model's, the data's."""
        return job_config(self.config, self.model)

    def resolve(self, values: Mapping[str, Any], *, where: str = "config") -> Any:
        """The settings of a job.

        Args:
            values: what is set; the rest has defaults.
            where: what error messages call the source.

        Raises:
            UserError: an unknown key, or a value that is refused.
        """
        start: dict[str, Any] = {}
        if not values.get("train_data"):
            start["num_train_epochs"] = self.story_epochs
            if self.records == "prompt":
                start["reward"] = TASK_REWARDS.get(values.get("task") or "story", ())
        if not (values.get("model_name_or_path") or values.get("model_config")):
            start |= self.tiny
        return self.job_config.from_dict({**start, **values}, where=where)


METHODS: dict[str, Method] = {
    "sft": Method(SFTConfig, "SFTTrainer", "sft", tiny={**_TINY, "learning_rate": 5e-3}, story_epochs=5),
    "reward": Method(
        RewardConfig, "RewardTrainer", "preference", model="reward", overlong="drop", story_epochs=6
    ),
    "prm": Method(PRMConfig, "PRMTrainer", "steps", model="prm", story_epochs=4),
    "dpo": Method(DPOConfig, "DPOTrainer", "preference"),
    "simpo": Method(SimPOConfig, "SimPOTrainer", "preference"),
    "kto": Method(KTOConfig, "KTOTrainer", "kto"),
    "ppo": Method(PPOConfig, "PPOTrainer", "prompt", tiny=_TINY_PPO),
    "grpo": Method(GRPOConfig, "GRPOTrainer", "prompt", tiny=_TINY_ONLINE),
}
"""What `rlhf-train <name>` trains."""
