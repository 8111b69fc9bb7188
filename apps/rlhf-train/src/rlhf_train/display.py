"""What a person sees of a MinMax run: plan, progress, tables, exchanges."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rlhf_data import RunFolder
from rlhf_minmax import Events
from rlhf_minmax.break_even import BreakEven
from rlhf_minmax.evaluate import Metrics

_TITLES = {"plain": "plain RLHF", "minmax": "MinMax"}
_LIVE = (
    ("accuracy", "policy/accuracy"),
    ("value", "minmax/value"),
    ("monitor", "monitor/verdict_balanced_accuracy"),
    ("λ", "dual/lambda"),
    ("violation", "constraint/violation_ema"),
)
_ROWS = (
    ("true accuracy", "policy/accuracy"),
    ("hack rate", "policy/hack_rate"),
    ("reward-model score", "policy/reward_score"),
    ("monitor balanced accuracy", "monitor/verdict_balanced_accuracy"),
    ("evidence in the story", "monitor/evidence_valid_rate"),
    ("critiques that parse", "monitor/parse_rate"),
    ("violation", "constraint/violation"),
    ("λ", "dual/lambda"),
    ("game value", "minmax/value"),
)
_SHOWN_EXCHANGES = 3
_PLAIN_LINES = 10


class ConsoleEvents(Events):
    """Prints a run to the console: live bars on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> ConsoleEvents:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def device_plan(self, rows: list[dict[str, str]]) -> None:
        """A table of roles and devices."""
        table = Table(title="Device plan", title_justify="left")
        for name in ("role", "device", "dtype", "reason"):
            table.add_column(name)
        for row in rows:
            table.add_row(row["role"], row["device"], row["dtype"], row["reason"])
        self.console.print(table)

    def demo_step(self, stage: str, step: int, total: int, metrics: dict[str, float]) -> None:
        """Progress of a demonstration model."""
        text = "  ".join(f"{k} {metrics[k]:.3f}" for k in ("loss", "accuracy") if k in metrics)
        self._advance(f"building {stage}", step, total, text)

    def break_even(self, check: BreakEven) -> None:
        """The gaps, the weight, and what they mean."""
        self.console.print(
            f"Break-even check on training stories: ΔR {check.delta_reward:.2f}, ΔJ {check.delta_judge_start:.2f} with "
            f"the start's critiques, {check.delta_judge_truthful:.2f} with truthful ones; "
            f"w_reward {check.w_reward:.2f}, w_judge {check.w_judge:.2f}"
        )
        self.console.print(f"  → {check.advice}")

    def phase(self, name: str, start: int, total: int) -> None:
        """A phase begins."""
        resumed = f", from step {start}" if start else ""
        self.console.print(f"{_TITLES[name]}: {total} steps{resumed}")

    def step(self, phase: str, step: int, total: int, metrics: Metrics) -> None:
        """Live metrics of a step."""
        parts = [f"{label} {metrics[key]:.2f}" for label, key in _LIVE if metrics.get(key) is not None]
        tokens, seconds = metrics.get("num_tokens"), self._elapsed(phase, int(metrics["num_tokens"] or 0))
        if tokens and seconds:
            parts.append(f"{seconds:,.0f} tokens/s")
        self._advance(_TITLES[phase], step, total, "  ".join(parts))

    def evaluated(self, block: str, metrics: Metrics) -> None:
        """One line per held-out evaluation."""
        hack = metrics["policy/hack_rate"]
        shown = f", hack rate {hack:.2f}" if hack is not None else ""
        self.console.print(
            f"held-out ({block}): true accuracy {metrics['policy/accuracy']:.2f}{shown}, "
            f"reward score {metrics['policy/reward_score']:+.2f}"
        )

    def show_results(self, results: dict[str, Any], run: RunFolder) -> None:
        """The table of the three columns, some exchanges, and where everything lies."""
        columns = [
            (title, results[block])
            for title, block in (("start", "before"), ("plain RLHF", "plain"), ("MinMax", "after"))
            if results.get(block)
        ]
        table = Table(title="Held-out stories, greedy", title_justify="left")
        table.add_column("")
        for title, _ in columns:
            table.add_column(title, justify="right")
        for label, key in _ROWS:
            table.add_row(label, *(_number(block.get(key)) for _, block in columns))
        self.console.print(table)
        if results.get("after") and "steps" in results:
            self._show_exchanges(run)
        where = "report.html" if (run.path / "report.html").exists() else "evaluation.json"
        self.console.print(f"{run.path / where}  ({results['wall_time']['total']:.0f} s)")

    def _show_exchanges(self, run: RunFolder) -> None:
        from rlhf_data import read_rows

        rows = [row for _, row in read_rows(run.path / "samples.jsonl") if row["stage"] == "minmax"]
        for row in rows[:_SHOWN_EXCHANGES]:
            mark = "right" if row["correct"] else "wrong"
            judge = "truly " + mark
            self.console.print(
                f"\n[bold]{escape(row['story'])}[/bold] {escape(row['question'])}\n"
                f"  policy : {escape(row['answer'])}   ({judge}; reward {row['reward_score']:+.2f})\n"
                f"  monitor: {escape(row['critique'])}   (verdict {row['verdict']}; judge {row['judge_score']:+.2f})"
            )
        self.console.print()

    def _elapsed(self, phase: str, tokens: int) -> float:
        """Tokens per second of a phase since its first step in this process; 0 at that step."""
        now = time.perf_counter()
        if phase not in self._started:
            self._started[phase] = (now, tokens)
        since, before = self._started[phase]
        return (tokens - before) / (now - since) if now > since else 0.0

    def _advance(self, title: str, step: int, total: int, text: str) -> None:
        if title not in self._tasks:
            self._tasks[title] = self._progress.add_task(title, total=total, metrics="")
        self._progress.update(self._tasks[title], completed=step, metrics=text)
        every = max(1, total // _PLAIN_LINES)
        if not self.console.is_terminal and (step % every == 0 or step == total):
            self.console.print(f"{title}: {step}/{total}  {text}")


def show_plan(plan: dict[str, Any]) -> None:
    """Print a dry run: what would run, with how many tokens and how much memory."""
    console = Console(soft_wrap=True)
    events = ConsoleEvents(console)
    events.device_plan(plan["device_plan"])
    table = Table(title="Dry run: nothing was trained", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("")
    for label, value in plan["rows"]:
        table.add_row(label, value)
    console.print(table)
    for warning in plan["warnings"]:
        console.print(f"warning: {warning}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
