"""What happens around a training's steps: logging, evaluation's verdict, checkpoints, a clean stop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from rlhf_algos.engine.observers import Observers
from rlhf_algos.engine.signals import GracefulStop
from rlhf_algos.tracking.metrics_log import TrainingLogger
from rlhf_algos.tracking.step_report import Pace
from rlhf_algos.tracking.trackers import create_trackers
from rlhf_data import UserError

if TYPE_CHECKING:
    from rlhf_algos.configs.trainer import LoopConfig
    from rlhf_algos.engine.base_trainer import BaseTrainer

__all__ = ["TrainingEvents", "TrainingStopped", "check_best_metric", "check_evaluations"]

_LOG = logging.getLogger(__name__)


class TrainingStopped(KeyboardInterrupt):
    """SIGTERM or SIGINT ended a training after a step, with a checkpoint written.

    Attributes:
        exit_code: what the process should exit with: 143 after SIGTERM, 130 after SIGINT.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped by a signal")
        self.exit_code = exit_code


class TrainingEvents:
    """Follows one call of `BaseTrainer.train`; a context manager.

    A trainer with a run folder answers SIGTERM and SIGINT with a checkpoint and `TrainingStopped` after the
    step; one without is ended by them at once, as usual.

    Attributes:
        finished: whether training is to end before its last step.
    """

    def __init__(self, trainer: BaseTrainer[Any]) -> None:
        self._trainer = trainer
        self.finished = trainer.state.stopping.reached  # a checkpoint may be that of the last evaluation
        main = trainer.parallel.is_main
        self._stop = GracefulStop(*([] if main else [""])) if trainer.run else None
        run = trainer.run if main else None
        trainer.observers = self._observers = Observers(trainer)
        config = trainer.config
        trackers = (
            create_trackers(
                config.report_to,
                run.path,
                config.to_dict(),
                name=type(trainer).__name__.removesuffix("Trainer").lower(),
                first_step=trainer.step + 1,
            )
            if run and config.report_to
            else None
        )
        self._logger = TrainingLogger(
            run,
            total_steps=trainer.total_steps,
            done_steps=trainer.step,
            show=trainer.shown_metrics,
            progress=trainer.progress if main else False,
            trackers=[trackers] if trackers else (),
            logging_steps=config.logging_steps,
        )
        self._pace = Pace(trainer.total_steps, step=trainer.step, num_tokens=trainer.num_tokens)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start the progress line, take over the signals."""
        self._stack.enter_context(self._logger)
        if self._stop is not None:
            self._stack.enter_context(self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo both, also after an error, and draw what the debug switches recorded."""
        self._stack.__exit__(kind, error, trace)
        self._trainer.observers = None
        self._observers.draw()

    def after_step(self, metrics: dict[str, float]) -> None:
        """Log a step and do what is due after it.

        Raises:
            TrainingStopped: a signal came.
            UserError: the evaluation does not give `metric_for_best_model`.
        """
        trainer, config = self._trainer, self._trainer.config
        logged = self._logger.log(trainer.step, metrics)
        if trainer.on_step:
            trainer.on_step(trainer.step, metrics)
        self._observers.after_step(trainer.step)
        evaluated = self._judge(metrics)
        code = self._exit_code() if trainer.run else 0
        last = trainer.due(config.save_steps) or self.finished or code
        due = last or (evaluated and config.load_best_model_at_end)
        checkpoint = self._save(metrics) if trainer.run and due else None
        if trainer.on_report:
            trainer.on_report(self._pace.report(trainer.step, metrics, logged=logged, checkpoint=checkpoint))
        if code:
            raise TrainingStopped(code)

    def after_last_step(self) -> None:
        """Take the best checkpoint's weights, where that was asked for."""
        trainer = self._trainer
        if trainer.config.load_best_model_at_end and trainer.state.manager:
            best = trainer.state.manager.best()
            if best is not None:
                trainer.load_weights(best)
                _LOG.info("the weights are those of %s, the best by %s", best.name, trainer.best_metric_name)

    def _judge(self, metrics: dict[str, float]) -> bool:
        """Take in an evaluation, if there was one; whether there was."""
        name = self._trainer.best_metric_name
        if not any(key.startswith("eval_") for key in metrics):
            return False
        check_best_metric(name, metrics)
        stop = self._trainer.state.stopping.update(metrics[name])
        if stop:
            patience = self._trainer.config.early_stopping_patience
            _LOG.info("stopped early: no better %s in %d evaluations", name, patience)
        self.finished = self.finished or stop
        return True

    def _save(self, metrics: dict[str, float]) -> Path | None:
        """Write a checkpoint; where it is."""
        trainer = self._trainer
        trainer.save_checkpoint(metrics)
        return trainer.run.checkpoint_path(trainer.step) if trainer.run else None

    def _exit_code(self) -> int:
        """The exit code that a signal to any of the processes asks for, 0 where none came."""
        code = (self._stop.exit_code or 0) if self._stop else 0
        parallel = self._trainer.parallel
        if parallel.world_size > 1:
            code = int(parallel.maximum(torch.tensor([code], device=parallel.device)))
        return code


def check_best_metric(name: str, metrics: Mapping[str, float]) -> None:
    """Refuse a `metric_for_best_model` that evaluation does not give.

    Raises:
        UserError: `name` is not among the metrics.
    """
    if name not in metrics:
        known = ", ".join(key for key in metrics if key.startswith("eval_"))
        raise UserError(
            f"metric_for_best_model is {name}, which evaluation does not give; choose from {known}"
        )


def check_evaluations(config: LoopConfig, *, has_examples: bool, has_run: bool) -> None:
    """Refuse settings that compare evaluations with one another where there would be none to compare.

    Args:
        config: the settings.
        has_examples: whether there are examples to evaluate on.
        has_run: whether there is a run folder for checkpoints.

    Raises:
        UserError: `load_best_model_at_end` or `early_stopping_patience` could have no effect.
    """
    names = ("load_best_model_at_end", "early_stopping_patience")
    if not (wanted := " and ".join(name for name in names if getattr(config, name))):
        return
    if config.eval_steps is None or not has_examples:
        missing = "held-out rows" if config.eval_steps else "eval_steps"
        raise UserError(f"{wanted} compares evaluations during training; it needs {missing}, or leave it out")
    if config.load_best_model_at_end and not has_run:
        raise UserError("load_best_model_at_end needs a run folder for its checkpoints; give the trainer one")
