"""The methods of training: what each is made of.  `METHODS` has one entry per method; it loads no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rlhf_algos.configs.trainer import TrainerConfig
    from rlhf_algos.engine.base_trainer import BaseTrainer
    from rlhf_algos.jobs.config import JobConfig, ModelKind
    from rlhf_data import SettingsSource

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
        config: the class of its settings, or its name in `rlhf_algos`, which is imported when it is needed
            (it loads pydantic).
        trainer: a subclass of `BaseTrainer`, or its name, as of `config` (it loads torch).
        records: name of the record kind that rows become, see `rlhf_data.load_records`.
        model: what is trained: a language model, or one with a scalar head that scores texts or steps.
        overlong: whether rows of more than `max_length` tokens are cut or left out.
        tiny: settings that suit the tiny model that is built if none is given; they override the
            config's defaults and are overridden by anything set.
        story_epochs: passes over the rows of the story world, unless set.
        summary: one line for the command's help.
        title: what a model card calls it; None is its name.
        paper: its arXiv number.
        trl: where TRL has a trainer for it, such as `trl.DPOTrainer`; None refuses `backend=trl`.
        trl_arguments: what TRL's config is given besides the settings that it shares.
    """

    config: type[TrainerConfig] | str
    trainer: type[BaseTrainer[Any]] | str
    records: str
    model: ModelKind = "policy"
    overlong: Literal["truncate", "drop"] = "truncate"
    tiny: Mapping[str, Any] = field(default_factory=lambda: _TINY)
    story_epochs: float = 3.0
    summary: str = ""
    title: str | None = None
    paper: str | None = None
    trl: str | None = None
    trl_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config_class(self) -> type[TrainerConfig]:
        """The class of its settings."""
        return _exported(self.config) if isinstance(self.config, str) else self.config

    @property
    def trainer_class(self) -> type[BaseTrainer[Any]]:
        """The class of its trainer."""
        return _exported(self.trainer) if isinstance(self.trainer, str) else self.trainer

    @property
    def online(self) -> bool:
        """Whether it trains on the model's own completions."""
        return self.records == "prompt"

    @cached_property
    def job_config(self) -> type[JobConfig]:
        """The class of a whole job's settings: the method's, the model's, the data's."""
        from rlhf_algos.jobs.config import job_config

        return job_config(self.config_class, self.model)

    def resolve(self, values: Mapping[str, Any], *, where: str | SettingsSource = "config") -> JobConfig:
        """The settings of a job.

        Args:
            values: what is set; the rest has defaults.
            where: what error messages call the source.

        Raises:
            UserError: an unknown key, or a value that is refused.
        """
        return self.job_config.from_dict({**self._start(values), **values}, where=where)

    def defaults(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults, as JSON values, of settings that `values` does not give; without required ones."""
        from pydantic import TypeAdapter

        fields = self.job_config.model_fields.items()
        usual = {each.alias or name: each.get_default(call_default_factory=True) for name, each in fields}
        required = {each.alias or name for name, each in fields if each.is_required()}
        start = self._start(values)
        known = {k: v for k, v in (usual | start).items() if k not in required - start.keys()}
        return TypeAdapter(dict[str, Any]).dump_python(known, mode="json")

    def _start(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that suit the built-in rows and the tiny model, where those are used."""
        from rlhf_algos.jobs.config import TASK_REWARDS

        start: dict[str, Any] = {}
        if not values.get("train_data"):
            start["num_train_epochs"] = self.story_epochs
            if self.records == "prompt":
                start["reward"] = TASK_REWARDS.get(values.get("task") or "story", ())
        if not (values.get("model_name_or_path") or values.get("model_config")):
            start |= self.tiny
        return start


def _exported(name: str) -> Any:
    return getattr(importlib.import_module("rlhf_algos"), name)


METHODS: dict[str, Method] = {
    "sft": Method(
        config="SFTConfig",
        trainer="SFTTrainer",
        records="sft",
        tiny={**_TINY, "learning_rate": 5e-3},
        story_epochs=5,
        summary="Supervised fine-tuning: learn to write the completions of the rows.",
        title="supervised fine-tuning",
        trl="trl.SFTTrainer",
    ),
    "reward": Method(
        config="RewardConfig",
        trainer="RewardTrainer",
        records="preference",
        model="reward",
        overlong="drop",
        story_epochs=6,
        summary="Reward model: score texts, from pairs of a better and a worse one.",
        title="a reward model's Bradley-Terry loss",
        paper="2203.02155",
        trl="trl.RewardTrainer",
    ),
    "judge": Method(
        config="JudgeConfig",
        trainer="JudgeTrainer",
        records="kto",
        model="judge",
        story_epochs=6,
        summary="Judge: the probability that a text is true or good, from labelled ones.",
        title="the cross-entropy of labels",
    ),
    "prm": Method(
        config="PRMConfig",
        trainer="PRMTrainer",
        records="steps",
        model="prm",
        story_epochs=4,
        summary="Process reward model: score every step of a solution.",
        title="a process reward model's loss on steps",
        paper="2305.20050",
    ),
    "dpo": Method(
        config="DPOConfig",
        trainer="DPOTrainer",
        records="preference",
        summary="Direct preference optimisation, on pairs and a reference.",
        title="direct preference optimization (DPO)",
        paper="2305.18290",
        trl="trl.DPOTrainer",
    ),
    "simpo": Method(
        config="SimPOConfig",
        trainer="SimPOTrainer",
        records="preference",
        summary="SimPO: preference optimisation on pairs, without a reference.",
        title="simple preference optimization (SimPO)",
        paper="2405.14734",
        trl="trl.experimental.cpo.CPOTrainer",
        trl_arguments={"loss_type": "simpo"},
    ),
    "orpo": Method(
        config="ORPOConfig",
        trainer="ORPOTrainer",
        records="preference",
        summary="ORPO: preference optimisation and supervised fine-tuning at once, without a reference.",
        title="odds ratio preference optimization (ORPO)",
        paper="2403.07691",
        trl="trl.experimental.orpo.ORPOTrainer",
    ),
    "kto": Method(
        config="KTOConfig",
        trainer="KTOTrainer",
        records="kto",
        summary="KTO: learn from completions that are labelled good or bad.",
        title="Kahneman-Tversky optimization (KTO)",
        paper="2402.01306",
        trl="trl.KTOTrainer",
    ),
    "ppo": Method(
        config="PPOConfig",
        trainer="PPOTrainer",
        records="prompt",
        tiny=_TINY_PPO,
        summary="PPO: learn from rewards of the model's own completions, with a value model.",
        title="proximal policy optimization (PPO)",
        paper="1707.06347",
    ),
    "grpo": Method(
        config="GRPOConfig",
        trainer="GRPOTrainer",
        records="prompt",
        tiny=_TINY_ONLINE,
        summary="GRPO: learn from rewards of the model's own completions, each compared with its group.",
        title="group relative policy optimization (GRPO)",
        paper="2402.03300",
    ),
}
"""The methods of `rlhf-train <name>`."""


def get_7b_model_config(method: str = "sft", *, gpus: int = 1, **settings: Any) -> JobConfig:
    """Settings of a job on a model of 7 to 8 billion parameters, for GPUs of 80 GB.

    Args:
        method: one of `METHODS`.
        gpus: how many processes train, one per GPU: up to 3 train adapters on a model that each holds
            in bfloat16; from 4 on all weights are trained, sharded with FSDP2.
        settings: what is set besides, such as `model_name_or_path` and `train_data`.

    Raises:
        UserError: an unknown method or key, or a value that is refused.
    """
    return _large("7b", method, gpus, settings)


def get_70b_model_config(method: str = "sft", *, gpus: int = 8, **settings: Any) -> JobConfig:
    """Settings of a job on a model of 70 billion parameters, for GPUs of 80 GB.

    Args:
        method: one of `METHODS`.
        gpus: how many processes train, one per GPU, at least 4: adapters on weights in bfloat16 that are
            sharded with FSDP2; from 64 on all weights are trained.
        settings: what is set besides, such as `model_name_or_path` and `train_data`.

    Raises:
        UserError: an unknown method or key, a value that is refused, or too few GPUs.
    """
    return _large("70b", method, gpus, settings)


def _large(size: str, method: str, gpus: int, settings: Mapping[str, Any]) -> JobConfig:
    from rlhf_algos.configs.presets import PRESETS, SMALLEST
    from rlhf_data import UserError

    if method not in METHODS:
        raise UserError(f"no method {method!r}; take one of {', '.join(METHODS)}", code="unknown_method")
    preset = next((name for least, name in SMALLEST[size] if gpus >= least), None)
    if preset is None:
        raise UserError(
            f"gpus is {gpus}, and a model of {size.upper()} needs {SMALLEST[size][-1][0]} GPUs of 80 GB at "
            "the least",
            code="too_few_gpus",
            gpus=gpus,
        )
    return METHODS[method].resolve({**PRESETS[preset], **settings}, where=f"the preset {preset}")
