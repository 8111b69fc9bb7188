"""Summary of a run: progress, key metrics and their trends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rlhf_eval.monitor.alerts import Alert, find_alerts
from rlhf_eval.monitor.logs import RunLog

PLOTS: dict[str, tuple[str, ...]] = {
    "reward": (
        *("reward", "eval_reward", "policy/accuracy", "minmax/value", "minmax/heldout_reward"),
        *("objective/rlhf_reward", "rewards/margins", "rewards/accuracies", "accuracy", "margin"),
    ),
    "loss": ("loss", "eval_loss", "policy/loss", "monitor/loss", "loss/value_avg"),
    "kl": (
        *("kl", "eval_kl", "eval_ref_kl", "objective/kl", "approx_kl", "policy/approxkl_avg", "policy/kl"),
        *("policy/approx_kl", "monitor/kl"),
    ),
    "lengths": (
        *("completions/mean_length", "completions/clipped_ratio", "policy/answer_length"),
        *("policy/truncated_rate", "monitor/critique_length"),
    ),
    "learning": (
        *("entropy", "policy/entropy_avg", "policy/entropy", "clip_ratio/region_mean"),
        *("policy/clipfrac_avg", "frac_reward_zero_std", "advantage_abs_mean", "grad_norm", "learning_rate"),
    ),
    "time": ("step_time", "samples_per_second", "tokens_per_second"),
    "memory": ("peak_memory_gb",),
    "workers": ("workers/waited_s", "workers/ready", "workers/lost", "workers/ahead", "workers/from_ledger"),
}
"""Metrics of each kind of plot, those before others that are looked at first."""
_BARS = "▁▂▃▄▅▆▇█"
_RECENT = 20


@dataclass(frozen=True)
class Summary:
    """A run at one moment.

    Args:
        name: the run's name.
        step: the last one; 0 before the first.
        total_steps: the run's last step, if that is known.
        seconds_per_step: median of the last steps; None if the log does not say.
        finished: whether it is over.
        alerts: what looks wrong.
        skipped: rows of the log that were left out.
        unnumbered: whether there are rows and none of them has a step.
        workers: a sentence about its rollout workers, if it has any.
    """

    name: str
    step: int
    total_steps: int | None
    seconds_per_step: float | None
    finished: bool
    alerts: tuple[Alert, ...]
    skipped: int
    unnumbered: bool = False
    workers: str = ""

    @property
    def seconds_left(self) -> float | None:
        """To the last step, at the pace of the last steps; None if unknown."""
        if self.finished or self.total_steps is None or self.seconds_per_step is None:
            return None
        return (self.total_steps - self.step) * self.seconds_per_step

    @property
    def text(self) -> str:
        """One sentence: step, pace, what is left, whether anything looks wrong."""
        if self.unnumbered:
            return "its rows have no step, by which they could be shown; log one as `step`"
        of = f" of {self.total_steps:,}" if self.total_steps and not self.finished else ""
        parts = [f"step {self.step:,}{of}" if self.step else "no step yet"]
        if self.seconds_per_step is not None:
            parts.append(f"{duration(self.seconds_per_step)} a step")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        if self.finished:
            parts.append("finished")
        count = len(self.alerts)
        parts.append(f"{count} alert{'s' * (count != 1)}" if count else "nothing looks wrong")
        return ", ".join(parts)


def summarise(log: RunLog) -> Summary:
    """How far a run is, after its `poll`."""
    rows = log.rows
    times = [row["step_time"] for row in rows[-_RECENT:] if isinstance(row.get("step_time"), int | float)]
    alerts = find_alerts(rows, config=log.config, finished=log.finished, age=log.age)
    return Summary(
        log.name,
        rows[-1]["step"] if rows else 0,
        log.total_steps,
        median(times) if times else None,
        log.finished,
        tuple(alerts),
        log.skipped,
        log.unnumbered,
        log.workers,
    )


def shown_keys(rows: Sequence[Mapping[str, Any]], plot: str = "all") -> list[str]:
    """Metrics of these rows that belong to a kind of plot; rewards of single functions belong to `reward`."""
    logged = dict.fromkeys(
        key for row in rows for key, value in row.items() if isinstance(value, int | float)
    )
    found: list[str] = []
    for name in PLOTS if plot == "all" else (plot,):
        found += [key for key in PLOTS[name] if key in logged]
        if name == "reward":
            found += [key for key in logged if key.startswith("rewards/") and key.endswith("/mean")]
    return found


def sparkline(points: Sequence[tuple[float, float]], width: int = 32) -> str:
    """Values over the steps as a line of bars, means of equal stretches of steps; empty without values.

    Args:
        points: (step, value) in order of the steps.
        width: bars at most.
    """
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    width = min(width, len(points))
    stretches: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        stretches[min(width - 1, int((step - first) / max(last - first, 1) * width))].append(value)
    means = [fmean(stretch) for stretch in stretches if stretch]
    low, high = min(means), max(means)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return _BARS[0] * len(means)
    return "".join(_BARS[int((mean - low) / (high - low) * (len(_BARS) - 1) + 0.5)] for mean in means)


def duration(seconds: float) -> str:
    """Seconds as people say them: 0.35 s, 12 s, 14 min, 3 h 05 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
