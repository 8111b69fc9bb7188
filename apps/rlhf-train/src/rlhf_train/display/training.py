"""Terminal output of a training run: one line per stage, progress, result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlhf_algos import StepReport
from rlhf_data import RunFolder
from rlhf_train.display.console import device_table, make_console, warning_line
from rlhf_train.display.log_lines import LogLines

_PACKAGES = ("rlhf_data", "rlhf_models", "rlhf_eval", "rlhf_algos", "rlhf_train")
_ALWAYS = ("learning_rate", "grad_norm")
"""Shown of every step, after the metrics that the method names."""


class TrainingDisplay:
    """Prints the log of the packages, the steps where no progress line can be drawn, and the results.

    `shown` are the metrics shown of a step. With `quiet`, as in all processes but the first, nothing is
    printed.
    """

    def __init__(
        self, shown: Sequence[str] = ("loss",), console: Console | None = None, *, quiet: bool = False
    ) -> None:
        self.shown = shown
        self.console = console or make_console()
        self.console.quiet = quiet
        self.progress: bool | None = False if quiet else None
        """The trainer's progress function: a line where the console is a terminal, otherwise nothing."""
        self._log = LogLines(self.console, _PACKAGES)

    def __enter__(self) -> TrainingDisplay:
        self._log.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.__exit__(kind, error, trace)

    def on_report(self, report: StepReport) -> None:
        """A line for a logged step where no progress line is drawn; one for an evaluation, a checkpoint."""
        start = f"{time.strftime('%H:%M:%S')}  step {report.step}/{report.total}  "
        names = [name for name in dict.fromkeys((*self.shown, *_ALWAYS)) if name in report.metrics]
        if names and report.logged and not self.console.is_terminal:
            self.say(start + "  ".join([*(f"{n} {report.metrics[n]:.4g}" for n in names), *_pace(report)]))
        if report.evaluation:
            shown = (f"{name.removeprefix('eval_')} {x:.4g}" for name, x in report.evaluation.items())
            self.say(f"{start}evaluation: {'  '.join(shown)}")
        if report.checkpoint:
            self.say(f"{start}wrote {report.checkpoint.name}")

    def show_plan(self, plan: dict[str, Any]) -> None:
        """Print a dry run: where and what would run, with how many tokens and how much memory; warnings."""
        if "device_plan" in plan:
            self.console.print(device_table(plan["device_plan"]))
        table = Table(title="Dry run: nothing is trained", title_justify="left", box=box.ROUNDED)
        table.show_header = False
        table.add_column()
        table.add_column(overflow="fold")
        for label, value in plan["rows"]:
            table.add_row(label, Text(value))
        self.console.print(table)
        for warning in plan.get("warnings", ()):
            self.console.print(warning_line(warning))

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(Text(text))

    def stage(self, name: str) -> None:
        """A stage of several begins."""
        self._log.forget()
        self.console.print(Text(f"stage {name}", "bold"))

    def demo_step(self, stage: str, step: int, total: int, metrics: dict[str, float]) -> None:
        """A training step of a model that is built now: a line when one is finished."""
        if step == total:
            self.console.print(Text(f"built {stage}: {total} steps"))

    def show_results(self, results: dict[str, Any], run: RunFolder) -> None:
        """The table of held-out metrics at the start and at the end, the time, and where the files are."""
        self.show_table(results)
        self.show_end(results, run)

    def show_table(self, results: dict[str, Any], *, title: str = "Held-out rows") -> None:
        """The held-out metrics at the start and at the end, if there are any."""
        columns = [(name, results[name]) for name in ("before", "after") if results.get(name)]
        if not columns:
            return
        heads = [Column({"before": "start", "after": "end"}[name], justify="right") for name, _ in columns]
        table = Table("", *heads, title=title, title_justify="left", box=box.ROUNDED)
        for key in columns[-1][1]:
            table.add_row(key.removeprefix("eval_"), *(_number(block.get(key)) for _, block in columns))
        self.console.print(table)

    def show_end(self, results: dict[str, Any], run: RunFolder) -> None:
        """The time, and where the files are."""
        spent = results.get("wall_time")
        if spent:
            parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in spent.items() if part != "total")
            self.console.print(f"time: {spent['total']:.1f} s ({parts})")
        self.console.print(Text(f"written to {run.path}", overflow="fold"))
        for final in (run.path / "final", run.path / "ppo" / "final"):
            if final.is_dir():
                self.console.print(Text(f"the trained model: {final}", overflow="fold"))


def _pace(report: StepReport) -> list[str]:
    """Tokens in a second, and the time that is left as h:mm:ss."""
    rate = report.tokens_per_second
    left = timedelta(seconds=round(report.seconds_left))
    return [*([] if rate is None else [f"{rate:,.0f} tokens/s"]), f"{left} left"]


def _number(value: Any) -> str:
    return "–" if value is None else f"{round(value, 4) + 0.0:.4f}"  # no minus before zeros
