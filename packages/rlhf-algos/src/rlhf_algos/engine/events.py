"""Events around training steps: logging, early stopping, checkpoints, graceful shutdown."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlhf_algos.checkpoints.manager import CheckpointManager
from rlhf_algos.configs.trainer import ReportConfig, SelectionConfig
from rlhf_algos.engine.signals import GracefulStop
from rlhf_algos.process_group import all_reduce_max, is_main_process
from rlhf_algos.tracking.early_stopping import EarlyStopping
from rlhf_algos.tracking.metrics_log import TrainingLogger
from rlhf_algos.tracking.step_report import OnReport, Pace, is_evaluation
from rlhf_algos.tracking.trackers import create_trackers
from rlhf_data import BaseConfig, RunFolder, UserError

_LOG = logging.getLogger(__name__)


class TrainingStopped(KeyboardInterrupt):
    """SIGTERM, SIGINT or SIGHUP ended a training after a step, with a checkpoint written.

    Attributes:
        exit_code: what the process should exit with: 143 after SIGTERM, 130 after SIGINT, 129 after SIGHUP.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped by a signal")
        self.exit_code = exit_code


class TrainingEvents:
    """Everything a training loop does around its steps; a context manager from `start` to the last step.

    With a run folder SIGTERM, SIGINT and SIGHUP are answered with a checkpoint and `TrainingStopped` after
    the step; without one they end the process at once, as usual.

    Args:
        selection: the settings by which evaluations are compared.
        tracking: the settings of what is logged.
        run: where metrics and checkpoints go; None keeps nothing.
        checkpoints: the run folder's checkpoints; None without a run folder.
        best_metric: full name of the metric that evaluations are compared by.
        name: the job's name, for trackers.
        settings: all of the job, for trackers; None: `selection`.

    Attributes:
        stopping: counts evaluations without an improvement; part of a checkpoint's state.
        finished: whether training is to end before its last step.
    """

    def __init__(
        self,
        selection: SelectionConfig,
        tracking: ReportConfig,
        run: RunFolder | None,
        checkpoints: CheckpointManager | None,
        *,
        best_metric: str,
        name: str,
        settings: BaseConfig | None = None,
    ) -> None:
        self._selection, self._tracking = selection, tracking
        self._run, self._checkpoints = run, checkpoints
        self._name, self._settings = name, settings or selection
        self.stopping = EarlyStopping(
            best_metric,
            selection.early_stopping_patience,
            selection.early_stopping_threshold,
            greater_is_better=selection.greater_is_better,
        )
        self.finished = False
        self._stack = contextlib.ExitStack()

    def start(
        self,
        step: int,
        total_steps: int,
        num_tokens: float,
        *,
        show: Sequence[str] = ("loss",),
        progress: bool | None = False,
    ) -> Self:
        """Begin to follow a training.

        Args:
            step: steps done so far.
            total_steps: steps of the whole training.
            num_tokens: tokens computed so far.
            show: metrics in the progress line.
            progress: show a progress line; None shows it when the console is a terminal.
        """
        self.finished = self.stopping.reached  # a checkpoint may be that of the last evaluation
        main = is_main_process()
        self._stop = (GracefulStop() if main else GracefulStop(notice="")) if self._run else None
        run = self._run if main else None
        report_to = self._tracking.report_to if run else ()
        first = {"name": self._name, "first_step": step + 1}
        self._logger = TrainingLogger(
            run,
            total_steps=total_steps,
            done_steps=step,
            show=show,
            progress=progress if main else False,
            trackers=[create_trackers(report_to, run.path, self._settings.to_dict(), **first)]
            if run and report_to
            else (),
            logging_steps=self._tracking.logging_steps,
        )
        self._pace = Pace(total_steps, step=step, num_tokens=num_tokens)
        return self

    def __enter__(self) -> Self:
        """Start the progress line, take over the signals."""
        self._stack.enter_context(self._logger)
        if self._stop is not None:
            self._stack.enter_context(self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop both, also after an error."""
        self._stack.__exit__(kind, error, trace)

    def after_step(
        self,
        step: int,
        metrics: dict[str, Any],
        save: Callable[[dict[str, Any]], None],
        due: bool,
        *,
        on_step: Callable[[int, dict[str, Any]], None] | None = None,
        on_report: OnReport | None = None,
    ) -> None:
        """Log a step and do what is due after it.

        Args:
            step: counted from 1.
            metrics: metrics of the step, and of the evaluation after it, if there was one.
            save: writes a checkpoint, given the metrics.
            due: whether the settings want one after this step.
            on_step: called when the step is logged.
            on_report: called after the checkpoint, if one was due.

        Raises:
            TrainingStopped: a signal came.
            UserError: the evaluation does not give `metric_for_best_model`.
        """
        logged = self._logger.log(step, metrics)
        if on_step:
            on_step(step, metrics)
        evaluated = self._take_evaluation(metrics)
        code = self._exit_code()
        due = due or self.finished or code > 0 or (evaluated and self._selection.load_best_model_at_end)
        checkpoint = None
        if self._run and due:
            save(metrics)
            checkpoint = self._run.checkpoint_path(step)
        if on_report:
            on_report(self._pace.report(step, metrics, logged=logged, checkpoint=checkpoint))
        if code:
            raise TrainingStopped(code)

    def after_last_step(self, load_best: Callable[[Path], None]) -> None:
        """Give the best checkpoint to `load_best`, if requested."""
        if not (self._selection.load_best_model_at_end and self._checkpoints):
            return
        best = self._checkpoints.best()
        if best is not None:
            load_best(best)
            _LOG.info("the weights are those of %s, the best by %s", best.name, self.stopping.metric)

    def _take_evaluation(self, metrics: Mapping[str, Any]) -> bool:
        """Process an evaluation, if there was one; returns whether there was."""
        if not any(is_evaluation(name) for name in metrics):
            return False
        name = self.stopping.metric
        check_best_metric(name, metrics)
        stop = self.stopping.update(math.nan if metrics[name] is None else metrics[name])
        if stop:
            patience = self._selection.early_stopping_patience
            _LOG.info("stopped early: no better %s in %d evaluations", name, patience)
        self.finished = self.finished or stop
        return True

    def _exit_code(self) -> int:
        """The exit code that a signal to any of the processes asks for, 0 where none came."""
        return all_reduce_max(self._stop.exit_code or 0) if self._stop else 0


def check_best_metric(name: str, metrics: Mapping[str, Any]) -> None:
    """Refuse a `metric_for_best_model` that evaluation does not give.

    Raises:
        UserError: `name` is not among the metrics.
    """
    if name not in metrics:
        known = ", ".join(key for key in metrics if is_evaluation(key))
        raise UserError(
            f"metric_for_best_model is {name}, which evaluation does not give; choose from {known}",
            code="unknown_metric",
            metric=name,
        )


def check_evaluations(
    config: SelectionConfig, eval_steps: int | None, *, examples: int, has_run: bool
) -> None:
    """Refuse settings that compare evaluations with one another where there would be none to compare.

    Args:
        config: the settings.
        eval_steps: steps between evaluations; None for none during training.
        examples: how many there are to evaluate on.
        has_run: whether there is a run folder for checkpoints.

    Raises:
        UserError: `load_best_model_at_end` or `early_stopping_patience` could have no effect.
    """
    names = ("load_best_model_at_end", "early_stopping_patience")
    if not (wanted := " and ".join(name for name in names if getattr(config, name))):
        return
    if eval_steps is None or not examples:
        missing = "held-out rows" if eval_steps else "eval_steps"
        raise UserError(
            f"{wanted} compares evaluations during training; it needs {missing}, or leave it out",
            code="missing_evaluation",
            missing=missing,
        )
    if config.load_best_model_at_end and not has_run:
        raise UserError(
            "load_best_model_at_end needs a run folder for its checkpoints; give the trainer one",
            code="missing_run_folder",
        )
