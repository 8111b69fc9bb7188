"""Runs in the terminal: progress, sparklines of metrics, alerts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlhf_eval.figures import pairs
from rlhf_eval.monitor import RunLog, Summary, shown_keys, sparkline

_MOST = 14


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
        # A metric that was logged last without a finite value has none, whatever it was before.
        last = f"{points[-1][1]:.4g}" if points and points[-1][0] == newest else "–"
        table.add_row(Text(key), Text(sparkline(points), style="blue"), Text(last))
    return Panel(Group(*lines, table), title=Text(summary.name), title_align="left")
