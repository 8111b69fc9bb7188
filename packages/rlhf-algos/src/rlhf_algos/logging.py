"""Metrics of a training run: one JSON line a step, and a progress line for whoever watches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["TrainingLogger"]


class MetricsFile(Protocol):
    """What is needed of a run folder; `rlhf_data.RunFolder` has it."""

    def append_metrics(self, metrics: dict[str, Any]) -> Any:
        """Add one line."""
        ...


class TrainingLogger:
    """Writes metrics.jsonl and shows steps, rate, time left and chosen metrics; a context manager.

    Args:
        run: where metrics go, for instance a `rlhf_data.RunFolder`; None writes none.
        total_steps: steps of the whole run.
        done_steps: steps done before (of a resumed run).
        description: first word of the progress line.
        show: names of the metrics shown in the progress line.
        progress: show the line; None shows it when the console is a terminal.
        console: a Rich console; None is standard output's.
    """

    def __init__(
        self,
        run: MetricsFile | None = None,
        *,
        total_steps: int,
        done_steps: int = 0,
        description: str = "train",
        show: Sequence[str] = ("loss",),
        progress: bool | None = None,
        console: Console | None = None,
    ) -> None:
        self.run = run
        self.show = tuple(show)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if progress is not False:
            self._progress = _progress_line(console, forced=progress is True)
        if self._progress is not None:
            self._task = self._progress.add_task(
                description, total=total_steps, completed=done_steps, metrics=""
            )

    def __enter__(self) -> Self:
        """Start the progress line."""
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the progress line, also after an error."""
        if self._progress is not None:
            self._progress.stop()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of one step and move the progress line to it.

        Args:
            step: counted from 1.
            metrics: name to number; `step` is added in front.
        """
        if self.run is not None:
            self.run.append_metrics({"step": step, **metrics})
        if self._progress is not None and self._task is not None:
            shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in self.show if name in metrics)
            self._progress.update(self._task, completed=step, metrics=shown)


def _progress_line(console: Console | None, *, forced: bool) -> Progress | None:
    """A Rich progress line, None where nobody would see it."""
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
            speed = task.finished_speed or task.speed
            return Text(f"{speed:.2f} steps/s" if speed else "-- steps/s")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
        console=console,
    )
