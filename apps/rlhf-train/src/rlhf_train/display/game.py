"""Terminal output of a MinMax run: plan, progress, tables, exchanges."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from rlhf_algos import StepReport
from rlhf_data import RunFolder, read_rows
from rlhf_minmax import Events
from rlhf_minmax.evaluation.break_even import BreakEven
from rlhf_minmax.evaluation.evaluate import Metrics
from rlhf_minmax.run.events import duration
from rlhf_train.display.console import device_table, make_console, warning_line
from rlhf_train.display.log_lines import LogLines

_TITLES = {"plain": "plain RLHF", "minmax": "MinMax"}
_BLOCKS = {"before": "start", "plain": "plain RLHF", "after": "MinMax"}
_LIVE = (
    ("policy accuracy", "policy/accuracy"),
    ("game value", "minmax/value"),
    ("monitor balanced accuracy", "monitor/verdict_balanced_accuracy"),
    ("λ", "dual/lambda"),
    ("violation", "constraint/violation_ema"),
)
_DEMO_LIVE = (("loss", "loss"), ("accuracy", "accuracy"))
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
_PARTS = (("demo", "building"), ("plain", "plain RLHF"), ("game", "game"), ("evaluation", "evaluation"))
_JUDGES = {"judge": "judge", "held_out_judge": "held-out judge"}
_SHOWN_EXCHANGES = 3
_PLAIN_LINES = 10
"""Lines per stage where the output is not a terminal."""


class ConsoleEvents(Events):
    """Prints a run to the console: a live bar with metrics on a terminal, a line now and then elsewhere.

    With `quiet`, as in all processes but the first, nothing is printed.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or make_console()
        self.console.quiet = quiet
        self._live = Live(console=self.console, transient=True, refresh_per_second=8)
        self._stage: _Stage | None = None
        self._log = LogLines(self.console, ("rlhf_algos.distributed",))

    def __enter__(self) -> ConsoleEvents:
        self._log.__enter__()
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._log.__exit__(kind, error, trace)

    def device_plan(self, rows: list[dict[str, str]]) -> None:
        """A table of roles and devices."""
        self.console.print(device_table(rows))

    def warning(self, text: str) -> None:
        """A highlighted line."""
        self.console.print(warning_line(text))

    def building(self, seconds: float) -> None:
        """How long building the models takes."""
        self.console.print(f"building the models that are not given: {duration(seconds)}")

    def demo_step(self, stage: str, step: int, total: int, metrics: dict[str, float]) -> None:
        """Progress of a demonstration model."""
        self._advance(f"building {stage}", step, total, _values(_DEMO_LIVE, metrics))

    def break_even(self, check: BreakEven) -> None:
        """The gaps, the weight, and what they mean."""
        table = Table.grid(padding=(0, 2))
        table.add_row("reward model: wrong answer over right one", f"ΔR {check.delta_reward:+.2f}")
        table.add_row("judge: right over wrong, the start's critiques", f"ΔJ {check.delta_judge_start:+.2f}")
        truthful, pays = check.delta_judge_truthful, check.pays_truthful
        shown = "not measured" if truthful is None else f"ΔJ {truthful:+.2f}"
        table.add_row("judge: right over wrong, truthful critiques", shown)
        table.add_row("weights", f"w_reward {check.w_reward:.2f}, w_judge {check.w_judge:.2f}")
        table.add_row(
            "stories where the truth scores higher, the start's critiques",
            f"{check.pays_start:.0%}",
        )
        shown = "not measured" if pays is None else f"{pays:.0%}"
        table.add_row("stories where the truth scores higher, truthful critiques", shown)
        without = f", {check.left_out} that name no right choice left out" if check.left_out else ""
        title = f"Break-even check on {check.stories} training stories{without}"
        self.console.print(Text(title, "italic"))
        self.console.print(Padding.indent(table, 2))
        self.console.print(Text(f"→ {check.advice}", "bold"))

    def phase(self, name: str, start: int, total: int) -> None:
        """A phase begins."""
        self._stage = _Stage(_TITLES[name], start)
        resumed = f", resumed from step {start}" if start else ""
        self.console.print(Text(f"{_TITLES[name]}: {total} steps{resumed}", "bold"))

    def step(self, phase: str, step: int, total: int, metrics: Metrics) -> None:
        """Live metrics of a step."""
        shown = _values(_LIVE, metrics)
        speed = self._current(_TITLES[phase], step).tokens_per_second(int(metrics["num_tokens"] or 0))
        if speed is not None:
            shown["tokens/s"] = f"{speed:,.0f}"
        self._advance(_TITLES[phase], step, total, shown)

    def report(self, phase: str, report: StepReport) -> None:
        """A line for an evaluation during training and, if no bar is drawn, one for a checkpoint."""
        start = f"{_TITLES[phase]}: {report.step}/{report.total}  "
        found = {name.removeprefix("eval_"): value for name, value in report.evaluation.items()}
        if found:
            shown = (f"{label} {_number(found[key])}" for label, key in _ROWS if key in found)
            self.console.print(f"{start}evaluation: {', '.join(shown)}")
        if report.checkpoint and not self.console.is_terminal:
            self.console.print(f"{start}wrote {report.checkpoint.name}")

    def remark(self, text: str) -> None:
        """A line; the bar of a game that ended early goes."""
        self._live.update("")
        self.console.print(text)

    def evaluated(self, block: str, metrics: Metrics) -> None:
        """One line per held-out evaluation."""
        hack = metrics["policy/hack_rate"]
        shown = f", hack rate {hack:.2f}" if hack is not None else ""
        self.console.print(
            f"held-out, {_BLOCKS[block]}: true accuracy {metrics['policy/accuracy']:.2f}{shown}, "
            f"reward score {metrics['policy/reward_score']:+.2f}"
        )

    def show_results(self, results: dict[str, Any], run: RunFolder) -> None:
        """The table of the three columns, some exchanges, the time, and where the files are."""
        columns = [(title, results[block]) for block, title in _BLOCKS.items() if results.get(block)]
        titles = [Column(title, justify="right") for title, _ in columns]
        table = Table("", *titles, title="Held-out stories, greedy", title_justify="left", box=box.ROUNDED)
        for label, key in _ROWS:
            table.add_row(label, *(_number(block.get(key)) for _, block in columns))
        self.console.print(table)
        if results.get("after") and "steps" in results:
            self._show_exchanges(run)
        spent = results["wall_time"]
        parts = ", ".join(f"{label} {_seconds(spent[part])}" for part, label in _PARTS if spent[part])
        self.console.print(f"time: {_seconds(spent['total'])} ({parts})")
        for judge, usage in results.get("api_usage", {}).items():
            self.console.print(f"{_JUDGES[judge]}: {_usage(usage)}")
        where = "report.html" if "steps" in results else "evaluation.json"
        self.console.print(Text(str(run.path / where), "bold"))

    def _show_exchanges(self, run: RunFolder) -> None:
        written = [row for _, row in read_rows(run.path / "samples.jsonl")]
        rows = [row for row in written if row["stage"] == "minmax" and "step" not in row]
        before = None
        for row in rows[:_SHOWN_EXCHANGES]:
            self.console.print(_exchange(row, with_story=row["story"] != before))
            self.console.print()
            before = row["story"]

    def _current(self, title: str, step: int) -> _Stage:
        """The stage of this title, begun now where it is new, or where its steps begin anew."""
        if self._stage is None or self._stage.title != title or step < self._stage.step:
            self._stage = _Stage(title, step)  # its clock starts after this step
        self._stage.step = step
        return self._stage

    def _advance(self, title: str, step: int, total: int, shown: dict[str, str]) -> None:
        stage = self._current(title, step)
        if step == total:
            self._live.update("")
            line = Text.assemble(("✓ ", "green"), f"{title}: {total} steps in {_seconds(stage.seconds)}")
            self.console.print(line.append(f"  {_joined(shown)}", "dim"))
        elif self.console.is_terminal:
            self._live.update(stage.renderable(step, total, shown))
        elif step % max(1, total // _PLAIN_LINES) == 0 and step > stage.start:
            self.console.print(f"{title}: {step}/{total}  {stage.pace(step, total)}  {_joined(shown)}")


class _Stage:
    """One bar: its clock, its speed, and how it looks."""

    def __init__(self, title: str, start: int = 0) -> None:
        self.title, self.start, self.step = title, start, start
        self._started = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[elapsed]}"),
            TimeRemainingColumn(compact=True),
        )
        self._task = self._progress.add_task(title, total=None, elapsed="")

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return time.perf_counter() - self._started

    def pace(self, step: int, total: int) -> str:
        """Seconds a step, and the time that is left as h:mm:ss."""
        speed = self.seconds / max(1, step - self.start)
        return f"{_seconds(speed)} a step, {timedelta(seconds=round((total - step) * speed))} left"

    def tokens_per_second(self, num_tokens: int) -> float | None:
        """Speed since the first step of this process; None at that step."""
        now = time.perf_counter()
        if self._first is None:
            self._first = (now, num_tokens)
            return None
        return (num_tokens - self._first[1]) / max(now - self._first[0], 1e-9)

    def renderable(self, step: int, total: int, shown: dict[str, str]) -> Group:
        """The bar, and the metrics under it."""
        self._progress.update(self._task, total=total, completed=step, elapsed=_seconds(self.seconds))
        labels = (Column(label, justify="right") for label in shown)
        table = Table(*labels, box=None, padding=(0, 2), header_style="dim")
        table.add_row(*shown.values())
        return Group(self._progress, table)


def _exchange(row: dict[str, Any], *, with_story: bool) -> Table:
    """Question, answer, critique, verdict and scores of one exchange."""
    truth = "right" if row["correct"] else f"wrong, it is {_clean(row['gold'])}"
    verdict = row["verdict"] or "none that parses"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if with_story:
        table.add_row("story", Text(_clean(row["story"])))
    table.add_row("question", Text(_clean(row["question"])))
    table.add_row("choices", Text(" | ".join(map(_clean, row["choices"])), "dim"))
    table.add_row("policy", Text(_clean(row["answer"]), "bold"))
    table.add_row("", Text(f"in truth {truth}; reward {row['reward_score']:+.2f}", "dim"))
    table.add_row("monitor", Text(_clean(row["critique"]), "bold"))
    table.add_row("", Text(f"verdict {verdict}; judge {row['judge_score']:+.2f}", "dim"))
    return table


def _clean(text: str) -> str:
    """Text on one line, without characters that would move a terminal's cursor."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def _values(labels: tuple[tuple[str, str], ...], metrics: Metrics | dict[str, float]) -> dict[str, str]:
    found = {label: metrics.get(key) for label, key in labels}
    return {label: f"{value:.2f}" for label, value in found.items() if value is not None}


def _joined(shown: dict[str, str]) -> str:
    return ", ".join(f"{label} {value}" for label, value in shown.items())


def _usage(usage: dict[str, Any]) -> str:
    """Requests and tokens of a judge behind an API, since this process started."""
    cost = "" if usage["cost"] is None else f", cost {usage['cost']:.3g}"
    unread = f"; no reply about {usage['unread']:,} texts could be read" if usage.get("unread") else ""
    return (
        f"{usage['requests']:,} requests ({usage['retries']:,} retries), {usage['cached']:,} texts from the "
        f"cache, {usage['prompt_tokens']:,} + {usage['completion_tokens']:,} tokens{cost}{unread}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
