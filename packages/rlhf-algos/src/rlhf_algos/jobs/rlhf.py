"""Traditional RLHF: supervised fine-tuning, a reward model, PPO against it; one folder, one command."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_algos.jobs.config import JobConfig, OnlineJobConfig
from rlhf_algos.jobs.data import load_rows
from rlhf_algos.jobs.methods import METHODS
from rlhf_algos.jobs.online import check_parts
from rlhf_algos.jobs.rlhf_config import STAGES, RLHFConfig, Stage
from rlhf_algos.jobs.training_job import TrainingJob
from rlhf_algos.process_group import broadcast, is_main_process
from rlhf_algos.tracking.step_report import OnReport
from rlhf_data import RunFolder, SettingsSource, UserError, atomic_write_json, finite, remove_folder

_LOG = logging.getLogger(__name__)
_CONFIG, _EVALUATION = "config.json", "evaluation.json"
_BEFORE_TRAINING = (_CONFIG, "base", "before.json", "preflight.json", "samples.jsonl")
"""Contents of a stage's folder before the first step."""


@dataclass
class RLHFTrainer:
    """Runs the stages one after the other, each in its own folder within the run's.

    A stage starts from what the one before it left: the reward model from the fine-tuned model, PPO from
    that too, rewarded by the reward model.  A stage that is finished is not run again; an unfinished one goes
    on from its newest checkpoint.

    Args:
        config: the settings.
        run: the run's folder.
        on_stage: called with the name of each stage as it begins.
        on_report: see `TrainingJob`.
        progress: see `BaseTrainer`.
        source: what the settings come from, which refusals name.
    """

    config: RLHFConfig
    run: RunFolder
    on_stage: Callable[[Stage], None] | None = None
    on_report: OnReport | None = None
    progress: bool | None = False
    source: SettingsSource = field(default_factory=SettingsSource)

    def train(self) -> dict[str, Any]:
        """Run every stage that is not finished; the results of all.

        Raises:
            UserError: settings, data or models cannot be used.
        """
        self._check_later_stages()
        if is_main_process():
            self.run.write_config({"method": "rlhf", **self.config.to_dict()})
        results: dict[str, Any] = {}
        for stage in self.config.stages:
            with self._stage_folder(stage) as folder:
                finished = broadcast(folder.read_results())
                if finished is not None:
                    _LOG.info("stage %s is finished: %s", stage, folder.path)
                    results[stage] = finished
                    continue
                if self.on_stage:
                    self.on_stage(stage)
                begun = broadcast((folder.path / _CONFIG).exists())
                job = TrainingJob(
                    stage, self._resolved(stage), folder, on_report=self.on_report, progress=self.progress
                )
                # Only the first process has the whole results; waiting for them, the others start the next
                # stage after its model is written.
                results[stage] = broadcast(job.train(resume=begun))
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
        if is_main_process():
            if not (self.run.path / _CONFIG).exists():
                self.run.write_config({"method": "rlhf", **self.config.to_dict()})
            atomic_write_json(self.run.path / _EVALUATION, finite(results))
        return results

    def plannable(self) -> dict[Stage, JobConfig]:
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
            if isinstance(config, OnlineJobConfig) and config.reward == (self._left_by("reward"),):
                changes["reward"] = ()
            found[stage] = config.model_copy(update=changes)
        return found

    def resolved(self) -> dict[Stage, JobConfig]:
        """The settings of each stage.

        Raises:
            UserError: a key or a value of a section is refused, or a stage has no rows.
        """
        return {stage: self._resolved(stage) for stage in self.config.stages}

    def _resolved(self, stage: Stage) -> JobConfig:
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
        return METHODS[stage].resolve(values, where=self.source.of_section(stage))

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
        needed = [config.model_name_or_path, *(config.reward if isinstance(config, OnlineJobConfig) else ())]
        mine = [self._left_by(earlier) for earlier in STAGES]
        return all(Path(path).is_dir() for path in needed if path in mine)

    def _check_later_stages(self) -> None:
        """Look at the rows and rewards of all stages but the first to run: no mistake waits for hours."""
        planned = self.plannable().items()
        unfinished = [each for each in planned if RunFolder(self.run.path / each[0]).read_results() is None]
        for stage, config in unfinished[1:]:
            check_parts(config)
            load_rows(METHODS[stage], config)

    @contextlib.contextmanager
    def _stage_folder(self, stage: Stage) -> Iterator[RunFolder]:
        """A stage's folder; it is removed again where the stage is refused before it began."""
        folder = RunFolder.create(self.run.path / stage, resume=True)
        try:
            yield folder
        except UserError:
            if is_main_process() and all(path.name in _BEFORE_TRAINING for path in folder.path.iterdir()):
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
        if is_main_process():
            self.run.write_results(summary)
        return summary
