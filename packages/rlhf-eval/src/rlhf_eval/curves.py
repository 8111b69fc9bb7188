"""Training curves: every metric of a run over its steps, with held-out values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_eval.figures import (
    BLUE,
    GREY,
    ORANGE,
    Panel,
    Rows,
    columns_of,
    make_panel,
    new_figure,
    pairs,
    save_png,
    step_axis,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter

_BOOK_KEEPING = (
    "step",
    "phase",
    "epoch",
    "num_tokens",
    "step_time",
    "episode",
    "num_updates",
    "samples_per_second",
    "peak_memory_gb",
)
_APART = ("eval_", "time/")
"""Prefixes of metrics that are not drawn among the curves of steps."""
_LAST = ("grad_norm", "learning_rate")
_MARKED, _SMOOTHED = 50, 100
"""Fewer points are marked, more are smoothed."""


def metric_keys(metrics: Rows) -> list[str]:
    """The metrics of a run that deserve a curve, in the order they were logged, the optimizer's last.

    Args:
        metrics: Rows of metrics.jsonl; counters, times and held-out values (`eval_...`) are left out.
    """
    logged = dict.fromkeys(
        key for row in metrics for key, value in row.items() if type(value) in (int, float)
    )
    keys = [key for key in logged if key not in _BOOK_KEEPING and not key.startswith(_APART)]
    return sorted(keys, key=lambda key: _LAST.index(key) + 1 if key in _LAST else 0)


def training_curves(
    metrics: Rows, keys: Sequence[str], path: str | Path, *, title: str | None = None
) -> None:
    """Draw one small panel per key over the steps, one line per phase, as a PNG.

    A long line is drawn pale with its running mean over it. Where rows have `eval_<key>`, those values are
    marked in the panel of the key.

    Args:
        metrics: Rows of metrics.jsonl; each has `step`, may have `phase`; missing and null values are
            skipped.
        keys: The metrics to draw, at least one; see `metric_keys`.
        path: The PNG file, replaced where it exists.
        title: Title of the whole figure.

    Raises:
        ValueError: `keys` is empty.
    """
    if not keys:
        raise ValueError("keys must name at least one metric")
    columns = min(3 if len(keys) <= 9 else 4, len(keys))
    lines = math.ceil(len(keys) / columns)
    with styled():
        figure = new_figure(5 * columns, 3.4 * lines)
        for index, key in enumerate(keys):
            _panel(figure.add_subplot(lines, columns, index + 1), metrics, key)
        _shared_legend(figure)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold", parse_math=False)
        save_png(figure, path)


def metric_panel(metrics: Rows, key: str) -> Panel:
    """One metric over the steps, with held-out values, as a figure for a page.

    Args:
        metrics: Rows of metrics.jsonl, as for `training_curves`.
        key: The metric.
    """
    values = pairs(metrics, "step", key) or pairs(metrics, "step", f"eval_{key}")
    caption = (
        f"{key}, {_label(values[-1][1], [])} at step {values[-1][0]:,.0f}" if values else f"{key}, no values"
    )
    if pairs(metrics, "step", f"eval_{key}"):
        caption += "; held out in orange"

    def draw(axes: Axes) -> None:
        _panel(axes, metrics, key)
        axes.set_title("")

    return make_panel(key, caption, draw, width=5.2, height=3.0)


def _panel(axes: Axes, metrics: Rows, key: str) -> None:
    phases = list(dict.fromkeys(row.get("phase") for row in metrics))
    for index, phase in enumerate(phases):
        points = pairs([row for row in metrics if row.get("phase") == phase], "step", key)
        _curve(axes, points, color=(BLUE, GREY)[index % 2], label="training" if phase is None else str(phase))
    held_out = pairs(metrics, "step", f"eval_{key}")
    if held_out:
        axes.plot(
            *columns_of(held_out),
            color=ORANGE,
            marker="o" if len(held_out) < _MARKED else "",
            markersize=6,
            markeredgecolor="white",
            label="held out",
            zorder=4,
        )
    if not axes.lines:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=GREY)
    axes.set_title(key, parse_math=False)
    step_axis(axes)
    axes.xaxis.set_major_formatter(lambda value, _: _whole(value))
    axes.yaxis.set_major_formatter(_tick_labels())


def _tick_labels() -> Formatter:
    from matplotlib.ticker import Formatter

    class Labels(Formatter):
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return [_label(value, values) for value in values]

        def __call__(self, x: float, pos: int | None = None) -> str:
            return _label(x, [])

    return Labels()


def _label(value: float, ticks: Sequence[float] | np.ndarray) -> str:
    """A tick's number with as many digits as tell the ticks apart; no factor, which hides under the title."""
    digits = next((n for n in range(4, 12) if len({f"{x:.{n}g}" for x in ticks}) == len(set(ticks))), 12)
    return f"{value:.{digits}g}"


def _whole(step: float) -> str:
    """A number of steps: 200, 20k, 2M."""
    factor, unit = (1e6, "M") if abs(step) >= 1e6 else (1e3, "k") if abs(step) >= 1e4 else (1, "")
    return f"{step / factor:g}{unit}"


def _curve(axes: Axes, points: list[tuple[float, float]], *, color: str, label: str) -> None:
    if not points:
        return
    steps, values = columns_of(points)
    if len(points) < _SMOOTHED:
        axes.plot(steps, values, color=color, marker="." if len(points) < _MARKED else "", label=label)
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
    axes.plot(steps, _running_mean(values), color=color, label=f"{label} (running mean)")


def _running_mean(values: list[float]) -> np.ndarray:
    """Mean of each value and its neighbours, a fortieth of the curve in all."""
    half = len(values) // 80
    shift = values[0]  # so that rounding moves no constant
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values) - shift)])
    at = np.arange(len(values))
    first, stop = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return shift + (sums[stop] - sums[first]) / (stop - first)


def _shared_legend(figure: Figure) -> None:
    """One legend for all panels, if there is more than one kind of line."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) | handles
    if len(handles) > 1:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
