"""Traditional RLHF: supervised fine-tuning, a reward model, PPO against it; one folder, one command."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rlhf_algos.job import TrainingJob
from rlhf_algos.job_data import load_rows
from rlhf_algos.methods import METHODS
from rlhf_algos.online_job import check_parts
from rlhf_algos.processes import from_first_process, is_first_process
from rlhf_algos.step_report import OnReport
from rlhf_data import BaseConfig, LocalPath, RunFolder, UserError, atomic_write_json
from rlhf_data.files import finite, remove_folder

__all__ = ["STAGES", "RLHFConfig", "RLHFOrchestrator", "RLHFTrainer", "Stage", "TrainingStage"]

_LOG = logging.getLogger(__name__)
Stage = Literal["sft", "reward", "ppo"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_FILES: dict[Stage, str] = {"sft": "sft.jsonl", "reward": "preference.jsonl", "ppo": "prompts.jsonl"}
"""What each stage's rows are called in a folder of data."""
_CONFIG, _EVALUATION = "config.json", "evaluation.json"
_BEFORE_TRAINING = (_CONFIG, "base", "before.json", "preflight.json")
"""What a stage's folder holds before the first step."""
_DATA_KEYS: dict[Stage, str] = {"sft": "sft_data", "reward": "preference_data", "ppo": "prompt_data"}


class TrainingStage(StrEnum):
    """A stage of the pipeline; the same as its name."""

    SFT = "sft"
    REWARD = "reward"
    PPO = "ppo"


class RLHFConfig(BaseConfig):
    """Settings of the three stages; each section takes the keys of its method."""

    model_name_or_path: LocalPath | None = None
    """Where the first stage starts: a model folder, or a hub name; null builds a tiny model."""
    reward_model: LocalPath | None = None
    """A reward model for PPO, in place of the one that the stage `reward` trains."""
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
    seed: int = Field(default=0, ge=0)
    """Seed of every stage."""
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
            raise ValueError("the stage ppo without the stage reward needs a reward_model; name one")
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
                raise UserError(f"data folder {self.data} does not exist; check the path")
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
        on_report: see `TrainingJob`.
        progress: see `BaseTrainer`.
    """

    config: RLHFConfig
    run: RunFolder
    on_stage: Callable[[Stage], None] | None = None
    on_report: OnReport | None = None
    progress: bool | None = False

    def train(self) -> dict[str, Any]:
        """Run every stage that is not finished; the results of all.

        Raises:
            UserError: settings, data or models cannot be used.
        """
        self._check_later_stages()
        if is_first_process():
            self.run.write_config({"method": "rlhf", **self.config.to_dict()})
        results: dict[str, Any] = {}
        for stage in self.config.stages:
            with self._stage_folder(stage) as folder:
                finished = from_first_process(folder.read_results())
                if finished is not None:
                    _LOG.info("stage %s is finished: %s", stage, folder.path)
                    results[stage] = finished
                    continue
                if self.on_stage:
                    self.on_stage(stage)
                begun = from_first_process((folder.path / _CONFIG).exists())
                job = TrainingJob(
                    stage, self._resolved(stage), folder, on_report=self.on_report, progress=self.progress
                )
                # Only the first process has the whole results; waiting for them, the others start the next
                # stage after its model is written.
                results[stage] = from_first_process(job.train(resume=begun))
        return self._finish(results)

    def evaluate_only(self) -> dict[str, Any]:
        """Held-out metrics of each stage's last checkpoint, or of its start; written to `evaluation.json`.

        Stages without held-out rows, and those whose start is not trained yet, are passed over.

        Raises:
            UserError: nothing can be evaluated.
        """
        found: dict[str, Any] = {}
        for stage, config in self.resolved().items():
            checkpoint = RunFolder(self.run.path / stage).latest_checkpoint()
            if checkpoint is None and not self._startable(stage):
                _LOG.info("stage %s is not evaluated: an earlier stage has to be trained first", stage)
                continue
            if not load_rows(METHODS[stage], config).held_out:
                _LOG.info("stage %s is not evaluated: it has no held-out rows", stage)
                continue
            if self.on_stage:
                self.on_stage(stage)
            with self._stage_folder(stage) as folder:
                found[stage] = TrainingJob(stage, config, folder).evaluate_only(checkpoint)
        if not found:
            raise UserError("no stage has held-out rows to evaluate on; give some: --set ppo.eval_data=FILE")
        results = {"method": "rlhf", "stages": found}
        if is_first_process():
            if not (self.run.path / _CONFIG).exists():
                self.run.write_config({"method": "rlhf", **self.config.to_dict()})
            atomic_write_json(self.run.path / _EVALUATION, finite(results))
        return results

    def plannable(self) -> dict[Stage, Any]:
        """The settings of each stage for a dry run.

        A stage that starts from what an earlier one will leave is planned with the model that the first one
        starts from, and PPO without the reward model that is not trained yet.
        """
        found = self.resolved()
        first = found[self.config.stages[0]]
        for stage, config in found.items():
            changes: dict[str, Any] = {}
            if config.model_name_or_path == self._left_by("sft"):
                changes |= {"model_name_or_path": first.model_name_or_path, "scratch": first.scratch}
            if stage == "ppo" and config.reward == (self._left_by("reward"),):
                changes["reward"] = ()
            found[stage] = config.model_copy(update=changes)
        return found

    def resolved(self) -> dict[Stage, Any]:
        """The settings of each stage.

        Raises:
            UserError: a key or a value of a section is refused, or a stage has no rows.
        """
        return {stage: self._resolved(stage) for stage in self.config.stages}

    def _resolved(self, stage: Stage) -> Any:
        config = self.config
        values: dict[str, Any] = {"seed": config.seed, **getattr(config, stage)}
        if (rows := config.rows_of(stage)) is not None:
            values["train_data"] = rows
        start = self._start(stage)
        if start is not None:
            values.setdefault("model_name_or_path", start)
            if self._tiny:
                values = {**METHODS[stage].tiny, **values}
        if stage == "ppo" and not values.get("reward"):
            values["reward"] = (config.reward_model or self._left_by("reward"),)
        return METHODS[stage].resolve(values, where=stage)

    @property
    def _tiny(self) -> bool:
        """Whether the first stage starts from the tiny model that is built now."""
        own = getattr(self.config, self.config.stages[0])
        return not (
            self.config.model_name_or_path or own.get("model_name_or_path") or own.get("model_config")
        )

    def _start(self, stage: Stage) -> str | None:
        """The model that a stage starts from."""
        if stage != "sft" and "sft" in self.config.stages:
            return self._left_by("sft")
        return self.config.model_name_or_path

    def _left_by(self, stage: Stage) -> str:
        return str((self.run.path / stage / "final").absolute())

    def _startable(self, stage: Stage) -> bool:
        """Whether the models that a stage starts from are there."""
        config = self._resolved(stage)
        needed = [config.model_name_or_path, *(config.reward if stage == "ppo" else ())]
        mine = [self._left_by(earlier) for earlier in STAGES]
        return all(Path(path).is_dir() for path in needed if path in mine)

    def _check_later_stages(self) -> None:
        """Look at the rows and rewards of all stages but the first to run: no mistake is to wait for hours.

        Raises:
            UserError: settings, rewards or rows of a stage cannot be used.
        """
        planned = self.plannable().items()
        unfinished = [each for each in planned if RunFolder(self.run.path / each[0]).read_results() is None]
        for stage, config in unfinished[1:]:
            if METHODS[stage].online:
                check_parts(config)
            load_rows(METHODS[stage], config)

    @contextlib.contextmanager
    def _stage_folder(self, stage: Stage) -> Iterator[RunFolder]:
        """A stage's folder; it is removed again where the stage is refused before it began."""
        folder = RunFolder.create(self.run.path / stage, resume=True)
        try:
            yield folder
        except UserError:
            if is_first_process() and all(path.name in _BEFORE_TRAINING for path in folder.path.iterdir()):
                remove_folder(folder.path)
            raise

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
        if is_first_process():
            self.run.write_results(summary)
        return summary


RLHFTrainer = RLHFOrchestrator
"""Another name."""
