"""Metrics of a training run: one JSON line a step, and a progress line for the terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from rlhf_algos.tracking.step_report import is_evaluation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


def setup_logging(level: int | str = "INFO", *, rich: bool = True, file: str | Path | None = None) -> None:
    """Show log records of all packages; replaces earlier handlers.

    Args:
        level: the lowest level that is shown.
        rich: show records in colour with Rich, or else as plain lines.
        file: a file that gets plain lines too.
    """
    from rich.logging import RichHandler

    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handlers: list[logging.Handler] = [RichHandler(show_path=False) if rich else logging.StreamHandler()]
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers[int(rich) :]:
        handler.setFormatter(plain)
    logging.basicConfig(level=level, format="%(message)s", handlers=handlers, force=True)


class MetricsFile(Protocol):
    """The interface of a run folder that is used here; `rlhf_data.RunFolder` implements it."""

    def append_metrics(self, metrics: dict[str, Any]) -> Any:
        """Add one line."""
        ...


class MetricsTracker(Protocol):
    """A tracker of the metrics; `rlhf_algos.tracking.trackers.create_trackers` makes them."""

    def log(self, metrics: Mapping[str, Any], step: int) -> Any:
        """Log the metrics of a step."""
        ...

    def finish(self) -> Any:
        """Flush and close."""
        ...


class TrainingLogger:
    """Writes metrics.jsonl, feeds trackers, shows steps, rate, time left and metrics; a context manager.

    Args:
        run: where metrics go, for instance a `rlhf_data.RunFolder`; None writes none.
        total_steps: steps of the whole run.
        done_steps: steps done before (of a resumed run).
        show: names of the metrics shown in the progress line.
        progress: show the line; None shows it when the console is a terminal.
        console: a Rich console; None is standard output's.
        trackers: they get what metrics.jsonl gets, and are finished with the logger.
        logging_steps: steps between the lines that are written; the last step, every evaluation (a name of
            `is_evaluation`, or of `capability/`) and every row with `findings` are written too.  The
            progress line follows every step.
    """

    def __init__(
        self,
        run: MetricsFile | None = None,
        *,
        total_steps: int,
        done_steps: int = 0,
        show: Sequence[str] = ("loss",),
        progress: bool | None = None,
        console: Console | None = None,
        trackers: Sequence[MetricsTracker] = (),
        logging_steps: int = 1,
    ) -> None:
        self.run, self.trackers = run, tuple(trackers)
        self.total_steps, self.logging_steps = total_steps, logging_steps
        self.show = tuple(show)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if progress is not False:
            self._progress = _progress_line(console, forced=progress is True)
        if self._progress is not None:
            self._task = self._progress.add_task("train", total=total_steps, completed=done_steps, metrics="")

    def __enter__(self) -> Self:
        """Start the progress line."""
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the progress line and finish the trackers, also after an error."""
        if self._progress is not None:
            self._progress.stop()
        for tracker in self.trackers:
            tracker.finish()

    def log(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Write the metrics of one step and move the progress line to it.

        Args:
            step: counted from 1.
            metrics: name to number; `step` is added in front.

        Returns:
            Whether the step is one that is written.
        """
        due = self._due(step, metrics)
        if due:
            if self.run is not None:
                self.run.append_metrics({"step": step, **metrics})
            for tracker in self.trackers:
                tracker.log(metrics, step)
        if self._progress is not None and self._task is not None:
            shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in self.show if name in metrics)
            self._progress.update(self._task, completed=step, metrics=shown)
        return due

    def _due(self, step: int, metrics: Mapping[str, Any]) -> bool:
        if step % self.logging_steps == 0 or step == self.total_steps:
            return True
        return "findings" in metrics or any(is_evaluation(name) or "capability/" in name for name in metrics)


def _rate(speed: float | None) -> str:
    """Steps per second, or seconds per step of a slow run."""
    if not speed:
        return "-- steps/s"
    return f"{speed:.2f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"


def _progress_line(console: Console | None, *, forced: bool) -> Progress | None:
    """A Rich progress line, None without a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    console = console or Console()
    if not forced and not console.is_terminal:
        return None

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_rate(task.finished_speed or task.speed))

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
        console=console,
    )
