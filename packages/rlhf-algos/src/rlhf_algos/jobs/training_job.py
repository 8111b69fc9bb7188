"""A whole training job: data, model, training, held-out metrics before and after, results."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_algos.checkpoints.manager import CheckpointManager
from rlhf_algos.configs.online import PPOConfig
from rlhf_algos.configs.trainer import ConsolidationConfig
from rlhf_algos.distributed.config import check_started
from rlhf_algos.engine.base_trainer import BaseTrainer
from rlhf_algos.engine.events import check_best_metric
from rlhf_algos.engine.language_model import LanguageModelTrainer
from rlhf_algos.jobs.config import JobConfig, OnlineJobConfig
from rlhf_algos.jobs.data import Rows, build_sets, demonstrated, load_rows, tell_left_out, with_skipped
from rlhf_algos.jobs.methods import METHODS, Method
from rlhf_algos.jobs.models import check_start, longest_sequence, start_model
from rlhf_algos.jobs.online import PREFLIGHT, check_value_model, load_rewards, online_parts, tell_findings
from rlhf_algos.jobs.results import finish_run
from rlhf_algos.jobs.tiny_models import few_threads_for_a_small_model
from rlhf_algos.online.base import OnlineTrainer
from rlhf_algos.parallel.same_files import check_same_on_all
from rlhf_algos.process_group import broadcast, world_size
from rlhf_algos.safeguards.consolidation import ElasticWeightConsolidation
from rlhf_algos.tracking.run_facts import Clock
from rlhf_algos.tracking.step_report import OnReport
from rlhf_data import RunFolder, TokenSequence, UserError, atomic_write_json, atomic_write_text, finite
from rlhf_infer import RewardFunctionFactory

_LOG = logging.getLogger(__name__)
_BEFORE, _EVALUATION = "before.json", "evaluation.json"
_FILE, _PAGE = "samples.jsonl", "samples.html"


@dataclass
class Job:
    """Inputs of a run of one method, by this engine or TRL."""

    name: str
    config: JobConfig
    run: RunFolder
    on_report: OnReport | None = None

    @property
    def method(self) -> Method:
        """The entry of `METHODS`."""
        return METHODS[self.name]

    def check_inputs(self) -> None:
        """Refuse models, rows and rewards that differ between machines; every process must call it.

        What reward workers load is not compared: the training processes need not see it, and the workers
        compare their files with each other.

        Raises:
            UserError: an input differs between processes, or is missing for some.
        """
        config = self.config
        named: list[Any] = [config.model_name_or_path, config.train_data, config.eval_data]
        if isinstance(config, OnlineJobConfig):
            workers = config.distributed.reward_workers if config.distributed else 0
            specs = () if workers else config.reward
            named += [path for spec in specs for path in RewardFunctionFactory.paths_in(spec)]
        if isinstance(config, PPOConfig):
            named.append(config.value_model_path)
        check_same_on_all(*filter(None, named))


@dataclass
class TrainingJob(Job):
    """One run of one method, from its settings to its results; see `Job`.

    Args:
        progress: see `BaseTrainer`.
    """

    progress: bool | None = False

    def train(self, *, resume: bool = False) -> dict[str, Any]:
        """Train, or continue from the newest checkpoint, write all outputs and return the results.

        A finished run is extended if the settings have more steps than it had.  The schedule of the
        learning rate is that of the new length, so a decaying one rises again to where it would have been.

        Raises:
            UserError: data, model or settings cannot be used, or the run is finished already.
        """
        if resume:
            _check_extension(self.run, self.config)
            self.config = with_rows_per_step(self.run, self.config)
        clock = Clock()
        trainer, rows = self.prepare()
        if trainer.parallel.is_main:
            self.run.remove_results()  # of the run that is extended
        clock.lap("loading")
        if resume:
            self._say_where(trainer.resume(), trainer.step, trainer.total_steps)
        with contextlib.closing(trainer):
            before = self._before(trainer)
            clock.lap("evaluation")
            looked = broadcast((self.run.path / PREFLIGHT).exists())
            if isinstance(trainer, OnlineTrainer) and not looked:
                tell_findings(trainer, self.run)
                clock.lap("preflight")
            if isinstance(trainer, LanguageModelTrainer):
                sample_stage(trainer, "start")
            last = trainer.train()
            left_out = tell_left_out(trainer.examples)
            clock.lap("training")
            after = self._after(trainer, last)
            if isinstance(trainer, LanguageModelTrainer):
                sample_stage(trainer, "end")
            _LOG.info("saving the model to %s in %s", self.run.path / "final", _dtype_name(trainer.model))
            trainer.save_model(self.run.path / "final")
            clock.lap("evaluation")
        results = {"before": before, "after": after, "wall_time": clock.split(), "resumed": resume}
        data = describe_rows(rows, len(trainer.examples), len(trainer.eval_examples)) | left_out
        results |= {"backend": "rlhf", "data": data, "num_tokens": trainer.num_tokens}
        if trainer.parallel.is_main:
            _LOG.info("drawing the curves, writing the model card and the results")
            results = finish_run(self.run, method=self.name, config=self.config.to_dict(), **results)
        return results

    def prepare(self) -> tuple[BaseTrainer[Any], Rows]:
        """Read the data, load the model, make the trainer; the settings are written once all is accepted.

        Raises:
            UserError: data, model or settings cannot be used.
        """
        config, method = self.config, self.method
        check_started(config)
        self.check_inputs()
        check_start(method, config)
        rows = load_rows(method, config)
        online = config if isinstance(config, OnlineJobConfig) else None
        rewards = load_rewards(online) if online else None
        shown = demonstrated(method, config, rows)
        model, tokenizer = start_model(method, config, shown, base_folder=self.run.path / "base")
        few_threads_for_a_small_model(model)
        generates = isinstance(config, OnlineJobConfig) and not config.use_vllm
        max_length = longest_sequence(model.config, config.max_length, generates=generates)
        check_value_model(config, tokenizer, max_length)
        train, held_out = build_sets(method, config, rows, tokenizer, max_length=max_length)
        trainer = method.trainer_class(
            model,
            config,
            train,
            eval_examples=held_out,
            tokenizer=tokenizer,
            run=self.run,
            progress=self.progress,
            **online_parts(online, model, tokenizer, self.run, rewards) if online else {},
        )
        _hold_weights(trainer, config, tokenizer, max_length)
        trainer.on_report = self.on_report
        if trainer.parallel.is_main:
            self.run.write_config({"method": self.name, **config.to_dict()})
        _LOG.info("data: %s rows of %s, %s held out", f"{len(train):,}", rows.source, f"{len(held_out):,}")
        return trainer, with_skipped(rows, train, held_out)

    def evaluate_only(self, checkpoint: Path | None = None) -> dict[str, Any]:
        """Held-out metrics of the start model, or of a checkpoint; written to `evaluation.json`.

        Raises:
            UserError: data, model or settings cannot be used, or no row is held out.
        """
        clock = Clock()
        trainer, rows = self.prepare()
        if not len(trainer.eval_examples):
            raise UserError(
                "there are no held-out rows to evaluate on; give some with --eval-data",
                code="no_held_out_rows",
            )
        if checkpoint is not None:
            trainer.load_checkpoint(checkpoint)
        clock.lap("loading")
        with contextlib.closing(trainer):
            metrics = trainer.evaluate()
        clock.lap("evaluation")
        results = {
            "method": self.name,
            "checkpoint": checkpoint.name if checkpoint else None,
            "before" if checkpoint is None else "after": metrics,
            "data": describe_rows(rows, len(trainer.examples), len(trainer.eval_examples)),
            "wall_time": clock.split(),
        }
        if trainer.parallel.is_main:
            atomic_write_json(self.run.path / _EVALUATION, finite(results))
        return results

    def _before(self, trainer: BaseTrainer[Any]) -> dict[str, float] | None:
        """Held-out metrics of the start model; for a resumed run, those measured at its start."""
        path = self.run.path / _BEFORE
        if not len(trainer.eval_examples):
            return None
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        _LOG.info("evaluating the start model on %s held-out rows", f"{len(trainer.eval_examples):,}")
        before = trainer.evaluate()
        check_best_metric(trainer.best_metric_name, before)
        if trainer.parallel.is_main:
            atomic_write_json(path, finite(before))
        return before

    def _after(self, trainer: BaseTrainer[Any], last: dict[str, float]) -> dict[str, float] | None:
        """Held-out metrics of the trained model: those of the last step, unless the best ones were loaded."""
        if not len(trainer.eval_examples):
            return None
        measured = {key: value for key, value in last.items() if key.startswith("eval_")}
        if measured and not self.config.load_best_model_at_end:
            return measured
        _LOG.info("evaluating the trained model on %s held-out rows", f"{len(trainer.eval_examples):,}")
        return trainer.evaluate()

    def _say_where(self, found: bool, step: int, total_steps: int) -> None:
        if found:
            _LOG.info("resumed from step %d of %d", step, total_steps)
        else:
            _LOG.info("there is no checkpoint in %s yet; starting at the first step", self.run.path)


def describe_rows(rows: Rows, train: int, held_out: int) -> dict[str, Any]:
    """Facts about the data for the results: where it is from, and how many rows are used for what."""
    return {"source": rows.source, "train_rows": train, "eval_rows": held_out, "bad_rows": rows.skipped}


def _dtype_name(model: Any) -> str:
    """The dtype of the parameters that are saved, as text."""
    trained = next((each for each in model.parameters() if each.requires_grad), None)
    return "the dtype it was trained in" if trained is None else str(trained.dtype).removeprefix("torch.")


def with_rows_per_step(run: RunFolder, config: JobConfig) -> JobConfig:
    """The settings with a per-process batch size that keeps a step's rows with another number of processes.

    The rows of an online method are completions: those of an optimizer step.

    Raises:
        UserError: the processes cannot share the rows equally.
    """
    latest = run.latest_checkpoint()
    rows = CheckpointManager.read_state(latest).get("rows_per_step") if latest else None
    if rows is None:
        return config
    what = "rows"
    if isinstance(config, OnlineJobConfig):  # whose checkpoint counts the prompts of a rollout
        rows, what = rows * config.num_generations // config.mini_batches, "completions"
    per_row = config.gradient_accumulation_steps * world_size()
    if rows == config.per_device_train_batch_size * per_row:
        return config
    if rows % per_row:
        raise UserError(
            f"{latest} was written with {rows} {what} per step, which {world_size()} processes x "
            f"{config.gradient_accumulation_steps} gradient_accumulation_steps cannot share equally; take "
            "another number of processes",
            code="different_training_data",
        )
    _LOG.info("%d %s per process and step, so that a step has the %d it had", rows // per_row, what, rows)
    return type(config).from_dict(config.to_dict() | {"per_device_train_batch_size": rows // per_row})


def _check_extension(run: RunFolder, config: JobConfig) -> None:
    """Refuse to continue a finished run whose settings ask for no more steps than it has."""
    if run.read_results() is None:
        return
    latest = run.latest_checkpoint()
    if latest is None:
        raise UserError(
            f"{run.path} holds a finished run without a checkpoint; start a new one from its final/",
            code="no_whole_checkpoint",
        )
    state = CheckpointManager.read_state(latest)
    steps, epochs = state["step"], state["epoch"]
    longer = config.max_steps > steps if config.max_steps > 0 else config.num_train_epochs > epochs
    if not longer:
        raise UserError(
            f"{run.path} holds a finished run of {steps} steps ({epochs:.3g} epochs); extend it with "
            "--max-steps or --epochs above that, or start a new one with another --output-dir",
            code="finished_run",
        )
    patience, bad = config.early_stopping_patience, state["stopping"]["bad_evaluations"]
    if patience is not None and bad >= patience:
        raise UserError(
            f"{run.path} stopped early, after {steps} steps, and would stop again at once; start a new run "
            "from its final/",
            code="finished_run",
        )


def _hold_weights(
    trainer: BaseTrainer[Any], config: JobConfig, tokenizer: Any, max_length: int | None
) -> None:
    """Set up elastic weight consolidation for a trainer, if its settings have it."""
    if not (isinstance(config, ConsolidationConfig) and config.ewc_strength):
        return
    scorer = trainer.scorer if trainer.parallel.fsdp else None
    held = ElasticWeightConsolidation(trainer.model, strength=config.ewc_strength, scorer=scorer)
    if config.ewc_data is not None:
        sft = METHODS["sft"]
        given = {"train_data": config.ewc_data, "subset_size": config.ewc_rows, "eval_fraction": 0}
        settings = sft.resolve({**given, "on_bad_row": config.on_bad_row})
        rows, _ = build_sets(sft, settings, load_rows(sft, settings), tokenizer, max_length=max_length)
        parts = [each if isinstance(each, tuple) else (each,) for each in rows]
        sequences = [part for each in parts for part in each if isinstance(part, TokenSequence)]
        _LOG.info("measuring which weights %d rows of %s need", len(sequences), config.ewc_data)
        held.estimate(sequences, fisher=config.ewc_fisher, seed=config.seed)
    trainer.consolidation = held


def sample_stage(trainer: LanguageModelTrainer[Any], stage: Literal["start", "end"]) -> None:
    """Write the model's completions of a few prompts; at the end also `samples.html` of both stages.

    Every process must call it.  The samples of the start are written only once, even if a run is resumed.
    """
    run, main = trainer.run, trainer.parallel.is_main
    assert run is not None
    known = run.read_lines(_FILE) if main else []
    before = trainer.step == 0 and not any(row.get("stage") == "start" for row in known)
    if stage == "start" and not broadcast(before):
        return
    rows = [{"stage": stage, **row} for row in trainer.stage_rows()]
    if not main or not rows:
        return
    rows = [row for row in known if row.get("stage") != stage] + rows
    run.write_samples(rows)
    if stage == "end":
        from rlhf_eval import samples_page

        atomic_write_text(run.path / _PAGE, samples_page(rows, title=run.path.resolve().name))
