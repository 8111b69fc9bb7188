"""The loop of `rlhf-report monitor`: poll the logs, show them, report alerts."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlhf_data import UserError, ensure_writable_folder
from rlhf_eval import training_curves
from rlhf_eval.figures import can_draw, pairs
from rlhf_eval.monitor import (
    RunLog,
    Summary,
    find_runs,
    monitor_page,
    open_log,
    shown_keys,
    sparkline,
    summarise,
)
from rlhf_report.watch.server import PageServer, serving

_MOST = 14


@dataclass(frozen=True)
class Options:
    """How runs are shown; see the command's help."""

    plot: str
    interval: float
    port: int | None
    output: Path | None
    alert_command: str | None
    once: bool = False


def follow(sources: Sequence[Path], log_dir: Path, options: Options) -> None:
    """Show runs until all of them are finished, or until Ctrl-C.

    Without `sources` the newest runs of `log_dir` are followed.
    """
    paths = list(sources) or find_runs(log_dir)
    if not paths:
        raise UserError(f"found no run in {log_dir}; name a run, or another folder with --log-dir")
    watch = _Watch([open_log(path) for path in paths], options)
    console = Console()
    terminal = console.is_terminal and not options.once
    served = options.port is not None and not options.once
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        server = stack.enter_context(serving(options.port or 0)) if served else None
        if server:
            click.echo(f"the runs are shown at {server.address} (Ctrl-C ends)")
        live = stack.enter_context(Live(console=console)) if terminal else None
        while True:
            watch.show(server, live)
            if not (live or server or (watch.command and not options.once)):
                console.print(dashboard(watch.runs, plot=options.plot))
                return
            if all(summary.finished for _, summary in watch.runs) and server is None:
                return
            time.sleep(options.interval)
            watch.poll()


class _Watch:
    """Runs with their summaries, and the alerts already reported."""

    def __init__(self, logs: Sequence[RunLog], options: Options) -> None:
        self.options, self.command = options, _command(options.alert_command)
        if options.output is not None:
            if not can_draw():
                raise UserError(
                    "--output needs matplotlib; pip install 'rlhf-eval[plots]'", code="missing_package"
                )
            ensure_writable_folder(options.output)
        self.runs = [(log, summarise(log)) for log in logs]
        self._changed = True
        self._alerted: set[tuple[str, str]] = set()

    def poll(self) -> None:
        """Read what was logged since the last poll."""
        grown = [log.poll() for log, _ in self.runs]
        runs = [(log, summarise(log)) for log, _ in self.runs]
        self._changed = any(grown) or [each.alerts for _, each in runs] != [
            each.alerts for _, each in self.runs
        ]
        self.runs = runs

    def show(self, server: PageServer | None, live: Live | None) -> None:
        """Update the display, the page and the figures, and report new alerts."""
        self._tell()
        plot, output = self.options.plot, self.options.output
        if live:
            live.update(dashboard(self.runs, plot=plot), refresh=True)
        if server and self._changed:
            refresh = max(1, math.ceil(self.options.interval))
            server.page = monitor_page(self.runs, plot=plot, refresh=refresh)
        if output is not None and self._changed:
            self._draw(output)

    def _tell(self) -> None:
        """Run the command for new alerts; an alert that went away and comes back counts as new."""
        now = {(str(log.path), alert.rule): alert for log, summary in self.runs for alert in summary.alerts}
        for (run, rule), alert in now.items():
            if self.command is None or (run, rule) in self._alerted:
                continue
            facts = {
                "RLHF_RUN": run,
                "RLHF_RULE": rule,
                "RLHF_STEP": str(alert.step),
                "RLHF_TEXT": alert.text,
            }
            done = subprocess.run(self.command, env={**os.environ, **facts}, check=False)
            if done.returncode:
                click.echo(f"--alert-command ended with exit code {done.returncode}", err=True)
        self._alerted = set(now)

    def _draw(self, folder: Path) -> None:
        for number, (log, summary) in enumerate(self.runs, start=1):
            if keys := shown_keys(log.rows, self.options.plot):
                name = summary.name.replace("/", "-")
                path = folder / (f"{number}-{name}.png" if len(self.runs) > 1 else f"{name}.png")
                training_curves(log.rows, keys, path, title=summary.name)


def _command(text: str | None) -> list[str] | None:
    if text is None:
        return None
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"--alert-command {text!r} cannot be read: {error}", code="unreadable_file"
        ) from error
    if not words or shutil.which(words[0]) is None:
        raise UserError(
            f"--alert-command: there is no program {words[0] if words else ''!r}; name one that runs"
        )
    return words


def dashboard(runs: Sequence[tuple[RunLog, Summary]], *, plot: str = "all") -> RenderableType:
    """A panel per run."""
    return Group(*(_panel(log, summary, plot) for log, summary in runs))


def _panel(log: RunLog, summary: Summary, plot: str) -> Panel:
    lines: list[RenderableType] = [Text(summary.text)]
    lines += [Text(summary.workers)] if summary.workers else []
    lines += [Text(f"! step {each.step}: {each.text}", style="bold red") for each in summary.alerts]
    if summary.skipped:
        lines.append(Text(f"about {summary.skipped:,} rows between were left out", style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for key in shown_keys(log.rows, plot)[:_MOST]:
        points = pairs(log.rows, "step", key)
        newest = next((row["step"] for row in reversed(log.rows) if key in row), None)
        # A metric whose last logged value was not finite shows none, whatever it was before.
        last = f"{points[-1][1]:.4g}" if points and points[-1][0] == newest else "–"
        table.add_row(Text(key), Text(sparkline(points), style="blue"), Text(last))
    return Panel(Group(*lines, table), title=Text(summary.name), title_align="left")
