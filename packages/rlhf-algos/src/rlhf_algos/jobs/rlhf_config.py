"""Settings of the three stages of traditional RLHF; loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rlhf_algos.distributed.config import ClusterConfig, trainers
from rlhf_algos.jobs.methods import METHODS
from rlhf_data import BaseConfig, LocalPath, UserError

Stage = Literal["sft", "reward", "ppo"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""The stages of traditional RLHF, in their order."""
_FILES: dict[Stage, str] = {"sft": "sft.jsonl", "reward": "preference.jsonl", "ppo": "prompts.jsonl"}
"""File name of each stage's rows in a folder of data."""
_DATA_KEYS: dict[Stage, str] = {"sft": "sft_data", "reward": "preference_data", "ppo": "prompt_data"}


class RLHFConfig(BaseConfig):
    """Settings of the three stages; each section has the keys of its method."""

    model_name_or_path: LocalPath | None = None
    """Model that the first stage starts from: a folder or hub name; null builds a tiny model."""
    reward_model: LocalPath | None = None
    """A reward model for PPO, instead of the one that the stage `reward` trains."""
    data: LocalPath | None = None
    """Folder with `sft.jsonl`, `preference.jsonl` and `prompts.jsonl`; those of the stages that run."""
    sft_data: LocalPath | None = None
    """Rows of the stage `sft`: a file, a `datasets` folder or a hub name."""
    preference_data: LocalPath | None = None
    """Rows of the stage `reward`."""
    prompt_data: LocalPath | None = None
    """Rows of the stage `ppo`."""
    stages: tuple[Stage, ...] = STAGES
    """Stages to run, in this order."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of every stage."""
    distributed: ClusterConfig | None = None
    """Training processes on a Ray cluster, in which all stages run; null trains in this process."""
    sft: dict[str, Any] = Field(default_factory=dict)
    """Settings of supervised fine-tuning, as `rlhf-train sft` takes them."""
    reward: dict[str, Any] = Field(default_factory=dict)
    """Settings of the reward model, as `rlhf-train reward` takes them."""
    ppo: dict[str, Any] = Field(default_factory=dict)
    """Settings of PPO, as `rlhf-train ppo` takes them."""

    @field_validator("sft", "reward", "ppo")
    @classmethod
    def _absolute_paths(cls, section: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return METHODS[str(info.field_name)].job_config.with_absolute_paths(section)

    @model_validator(mode="after")
    def _stages_in_order(self) -> RLHFConfig:
        if not self.stages or list(self.stages) != [stage for stage in STAGES if stage in self.stages]:
            raise ValueError(f"stages is {list(self.stages)}; expected some of {', '.join(STAGES)}, in order")
        if self.reward_model and "reward" in self.stages:
            raise ValueError(
                "reward_model takes the place of what the stage reward trains; leave one of them out"
            )
        rewarded = "reward" in self.stages or self.reward_model or self.ppo.get("reward")
        if "ppo" in self.stages and not rewarded and not self.embedded:
            raise ValueError("stages has ppo without reward, so the stage ppo needs a reward_model; name one")
        return self

    @model_validator(mode="after")
    def _stages_have_one_cluster(self) -> RLHFConfig:
        for stage in STAGES:
            if (getattr(self, stage).get("distributed") or {}).get("trainer_workers"):
                raise ValueError(
                    f"{stage}.distributed.trainer_workers is set, but the stages of rlhf all run in the same "
                    "training processes; set distributed.trainer_workers"
                )
        cluster = trainers(self)
        if cluster is None:
            return self
        if cluster.min_trainer_workers is not None:
            raise ValueError(
                "distributed.min_trainer_workers is set, but the stages of rlhf need all training processes; "
                "leave it out, or make the stages those of a pipeline"
            )
        if own := next((stage for stage in STAGES if getattr(self, stage).get("distributed")), None):
            raise ValueError(
                f"distributed and {own}.distributed are set; leave out one of them, or make the stages "
                "those of a pipeline"
            )
        return self

    @property
    def embedded(self) -> bool:
        """Whether neither data nor models are given, so that the run is about the embedded stories."""
        return not (self.model_name_or_path or self.reward_model or self.data or self._has_rows)

    @property
    def _has_rows(self) -> bool:
        return any(map(self._own_rows, STAGES))

    def _own_rows(self, stage: Stage) -> str | None:
        return getattr(self, _DATA_KEYS[stage]) or getattr(self, stage).get("train_data")

    def rows_of(self, stage: Stage) -> str | None:
        """Where the rows of a stage are; None for those of the story world, where no stage is given any.

        Raises:
            UserError: the folder of data has none, or rows are given to other stages only.
        """
        if own := self._own_rows(stage):
            return own
        if self.data:
            if not Path(self.data).is_dir():
                raise UserError(
                    f"data folder {self.data} does not exist; check the path", code="file_not_found"
                )
            path = Path(self.data) / _FILES[stage]
            if not path.exists():
                raise UserError(
                    f"{self.data} has no {_FILES[stage]}, the rows of the stage {stage}; add it, or run "
                    "other stages with --stage"
                )
            return str(path)
        if self._has_rows:
            option = f"--{_DATA_KEYS[stage].replace('_', '-')}"
            raise UserError(
                f"the stage {stage} has no rows; give it some with {option}, or run other stages with --stage"
            )
        return None
