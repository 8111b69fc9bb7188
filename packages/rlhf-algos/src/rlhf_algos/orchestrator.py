"""Traditional RLHF: supervised fine-tuning, a reward model, PPO against it; one folder, one command."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from rlhf_algos.job import OnStep, TrainingJob
from rlhf_algos.methods import METHODS
from rlhf_data import BaseConfig, RunFolder, UserError

__all__ = ["STAGES", "RLHFConfig", "RLHFOrchestrator", "Stage"]

_LOG = logging.getLogger(__name__)
Stage = Literal["sft", "reward", "ppo"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_FILES: dict[Stage, str] = {"sft": "sft.jsonl", "reward": "preference.jsonl", "ppo": "prompts.jsonl"}
"""What each stage's rows are called in a folder of data."""
_DATA_KEYS: dict[Stage, str] = {"sft": "sft_data", "reward": "preference_data", "ppo": "prompt_data"}


class RLHFConfig(BaseConfig):
    """Settings of the three stages; each section takes the keys of its method."""

    model_name_or_path: str | None = None
    """Where the first stage starts: a model folder, or a hub name; null builds a tiny model."""
    reward_model: str | None = None
    """A reward model for PPO, in place of the one that the stage `reward` trains."""
    data: str | None = None
    """Folder with `sft.jsonl`, `preference.jsonl` and `prompts.jsonl`; those of the stages that run."""
    sft_data: str | None = None
    """Rows of the stage `sft`: a file, a `datasets` folder or a hub name."""
    preference_data: str | None = None
    """Rows of the stage `reward`."""
    prompt_data: str | None = None
    """Rows of the stage `ppo`."""
    stages: tuple[Stage, ...] = STAGES
    """Stages to run, in this order."""
    seed: int = Field(default=0, ge=0)
    """Seed of every stage."""
    sft: dict[str, Any] = Field(default_factory=dict)
    """Settings of supervised fine-tuning, as `rlhf-train sft` takes them."""
    reward: dict[str, Any] = Field(default_factory=dict)
    """Settings of the reward model, as `rlhf-train reward` takes them."""
    ppo: dict[str, Any] = Field(default_factory=dict)
    """Settings of PPO, as `rlhf-train ppo` takes them."""

    @model_validator(mode="after")
    def _stages_in_order(self) -> RLHFConfig:
        if not self.stages or list(self.stages) != [stage for stage in STAGES if stage in self.stages]:
            raise ValueError(f"stages is {list(self.stages)}; expected some of {', '.join(STAGES)}, in order")
        if "ppo" in self.stages and "reward" not in self.stages and not (self.reward_model or self._named):
            raise ValueError("the stage ppo alone needs a reward_model; name one")
        return self

    @property
    def _named(self) -> bool:
        """Whether PPO's own section names what it is rewarded by."""
        return bool(self.ppo.get("reward"))

    def rows_of(self, stage: Stage) -> str | None:
        """Where the rows of a stage are."""
        given = getattr(self, _DATA_KEYS[stage])
        if given or not self.data:
            return given
        path = Path(self.data) / _FILES[stage]
        if not path.exists():
            raise UserError(
                f"{self.data} has no {_FILES[stage]}, the rows of the stage {stage}; add it or leave the "
                "stage out"
            )
        return str(path)


@dataclass
class RLHFOrchestrator:
    """Runs the stages one after the other, each in a folder of its own within the run's.

    A stage starts from what the one before it left: the reward model from the fine-tuned model, PPO from
    that too, rewarded by the reward model.  A stage that is finished is not run again; an unfinished one goes
    on from its newest checkpoint.

    Args:
        config: the settings.
        run: the run's folder.
        on_stage: told of the name of each stage as it begins.
        on_step: see `TrainingJob`.
        progress: see `BaseTrainer`.
    """

    config: RLHFConfig
    run: RunFolder
    on_stage: Callable[[Stage], None] | None = None
    on_step: OnStep | None = None
    progress: bool | None = False
    _jobs: dict[Stage, Any] = field(default_factory=dict)

    def train(self) -> dict[str, Any]:
        """Run every stage that is not finished; the results of all.

        Raises:
            UserError: settings, data or models cannot be used.
        """
        self.resolved()  # a mistake in a later stage's settings is answered before the first one is run
        self.run.write_config({"method": "rlhf", **self.config.to_dict()})
        results: dict[str, Any] = {}
        for stage in self.config.stages:
            folder = RunFolder.create(self.run.path / stage, resume=True)
            finished = folder.read_results()
            if finished is not None:
                _LOG.info("stage %s is finished: %s", stage, folder.path)
                results[stage] = finished
                continue
            if self.on_stage:
                self.on_stage(stage)
            job = TrainingJob(
                stage, self._resolved(stage), folder, on_step=self.on_step, progress=self.progress
            )
            results[stage] = job.train(resume=folder.latest_checkpoint() is not None)
        return self._finish(results)

    def evaluate_only(self) -> dict[str, Any]:
        """Held-out metrics of each stage's last checkpoint, or of its start where it has none.

        Raises:
            UserError: nothing can be evaluated.
        """
        results = {}
        for stage in self.config.stages:
            if self.on_stage:
                self.on_stage(stage)
            folder = RunFolder.create(self.run.path / stage, resume=True)
            job = TrainingJob(stage, self._resolved(stage), folder)
            results[stage] = job.evaluate_only(folder.latest_checkpoint())
        return results

    def plannable(self) -> dict[Stage, Any]:
        """The settings of the stages that a dry run can look at: those that need no earlier stage's model."""
        found = self.resolved()
        return {stage: config for stage, config in found.items() if self._startable(stage)}

    def _startable(self, stage: Stage) -> bool:
        start = self._start(stage)
        return (
            stage == "sft" or start is None or start == self.config.model_name_or_path or Path(start).is_dir()
        )

    def resolved(self) -> dict[Stage, Any]:
        """The settings of each stage."""
        return {stage: self._resolved(stage) for stage in self.config.stages}

    def _resolved(self, stage: Stage) -> Any:
        config = self.config
        values: dict[str, Any] = {"seed": config.seed, **getattr(config, stage)}
        if (rows := config.rows_of(stage)) is not None:
            values["train_data"] = rows
        start = self._start(stage)
        if start is not None:
            values.setdefault("model_name_or_path", start)
        if stage == "ppo" and not values.get("reward"):
            trained = self.run.path / "reward" / "final"
            values["reward"] = (config.reward_model or str(trained),)
        return METHODS[stage].resolve(values, where=stage)

    def _start(self, stage: Stage) -> str | None:
        """The model that a stage starts from."""
        if stage != "sft" and "sft" in self.config.stages:
            return str(self.run.path / "sft" / "final")
        return self.config.model_name_or_path

    def _finish(self, results: Mapping[str, Any]) -> dict[str, Any]:
        wall_time = {stage: found["wall_time"]["total"] for stage, found in results.items()}
        wall_time["total"] = sum(wall_time.values())
        last = results[self.config.stages[-1]]
        summary = {
            "method": "rlhf",
            "stages": {
                stage: {key: found[key] for key in ("before", "after", "steps", "num_tokens")}
                for stage, found in results.items()
            },
            "before": last["before"],
            "after": last["after"],
            "wall_time": wall_time,
            "versions": last["versions"],
        }
        self.run.write_results(summary)
        return summary
