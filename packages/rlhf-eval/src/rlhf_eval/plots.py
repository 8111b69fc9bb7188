"""Figures of a run: training curves and the four panels of a MinMax run.

matplotlib is imported when the first figure is drawn. Figures are drawn by its Agg and SVG backends
directly, so no display is needed and no global pyplot state is touched.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]

# Okabe & Ito's palette, distinguishable with every common form of colour blindness.
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#007E5C", "#A3507F", "#666666"
_ARMS = (("plain", "plain", "plain RLHF", _ORANGE), ("minmax", "after", "MinMax", _BLUE))
"""Phase of metrics.jsonl, block of results.json, label, colour."""
_STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "lines.linewidth": 2.0,
    "svg.hashsalt": "rlhf",
}


def training_curves(metrics: Rows, keys: Sequence[str], path: str | Path) -> None:
    """Draw one small panel per key over the steps, one line per phase, as a PNG.

    Args:
        metrics: Rows of metrics.jsonl; each has `step`, may have `phase`; missing and null values are
            skipped.
        keys: The metrics to draw, at least one.
        path: The PNG file, replaced where it exists.

    Raises:
        ValueError: `keys` is empty.
    """
    if not keys:
        raise ValueError("keys must name at least one metric")
    columns = min(3, len(keys))
    lines = math.ceil(len(keys) / columns)
    with _styled():
        figure = _new_figure(5 * columns, 3.4 * lines)
        for index, key in enumerate(keys):
            _key_panel(figure.add_subplot(lines, columns, index + 1), metrics, key)
        _save_png(figure, path)


def minmax_figure(metrics: Rows, results: dict[str, Any], path: str | Path) -> None:
    """Draw a MinMax run as one PNG of four panels, two by two.

    The panels: the policy's accuracy and hack rate (plain RLHF against MinMax), reward score against true
    accuracy, the monitor, and λ with the smoothed violation. Lines are sampled answers on training rows;
    large markers are the evaluations of `results`.

    Args:
        metrics: Rows of metrics.jsonl with `phase` "plain" or "minmax".
        results: The content of results.json; its `before`, `plain` and `after` blocks are used, and each
            may be missing or null.
        path: The PNG file, replaced where it exists.
    """
    with _styled():
        figure = _new_figure(11.2, 8.6)
        for index, (title, draw) in enumerate(_PANELS.values()):
            axes = figure.add_subplot(2, 2, index + 1)
            draw(axes, metrics, results)
            axes.set_title(title)
        _save_png(figure, path)


def minmax_panel_svgs(metrics: Rows, results: dict[str, Any]) -> dict[str, str]:
    """Draw the panels of `minmax_figure` one by one, for pages that arrange them by screen width.

    Args:
        metrics: Rows of metrics.jsonl.
        results: The content of results.json.

    Returns:
        Panel title -> SVG document, text drawn as outlines so that it looks the same everywhere.
    """
    with _styled():
        return {title: _panel_svg(draw, metrics, results) for title, draw in _PANELS.values()}


def _panel_svg(
    draw: Callable[[Axes, Rows, dict[str, Any]], None], metrics: Rows, results: dict[str, Any]
) -> str:
    figure = _new_figure(5.2, 3.7)
    draw(figure.add_subplot(1, 1, 1), metrics, results)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().decode("utf-8")


def _policy_panel(axes: Axes, metrics: Rows, results: dict[str, Any]) -> None:
    for phase, block, label, color in _ARMS:
        rows = _phase(metrics, phase)
        _line(axes, rows, "policy/accuracy", color=color, label=f"accuracy, {label}")
        _line(axes, rows, "policy/hack_rate", color=color, linestyle=":", label=f"hack rate, {label}")
        _line(axes, rows, "eval/policy/accuracy", color=color, linestyle="none", marker="o", markersize=5)
        _final_mark(axes, rows, results.get(block), "policy/accuracy", color)
    _label_marks(axes, "held-out accuracy")
    start = _value(results.get("before") or {}, "policy/accuracy")
    if start is not None:
        axes.axhline(start, color=_GREY, linewidth=1, linestyle="--", label="accuracy at start")
    _unit_axis(axes)
    _legend(axes, columns=2)


def _trade_panel(axes: Axes, metrics: Rows, results: dict[str, Any]) -> None:
    keys = ("policy/reward_score", "policy/accuracy")
    for phase, _, _, color in _ARMS:
        points = _pairs(_phase(metrics, phase), *keys)
        axes.plot(*_columns(points), color=color, alpha=0.45, linewidth=1.2, marker=".", markersize=4)
    marks = (
        ("before", "start", _GREY, "s"),
        ("plain", "plain RLHF", _ORANGE, "X"),
        ("after", "MinMax", _BLUE, "o"),
    )
    for block, label, color, marker in marks:
        points = _pairs([results.get(block) or {}], *keys)
        if points:
            axes.plot(
                *_columns(points),
                color=color,
                marker=marker,
                markersize=12,
                markeredgecolor="white",
                linestyle="none",
                label=label,
                zorder=4,
            )
    _unit_axis(axes)
    axes.set_xlabel("reward-model score")
    axes.set_ylabel("true accuracy")
    _legend(axes, columns=3)


def _monitor_panel(axes: Axes, metrics: Rows, results: dict[str, Any]) -> None:
    rows = _phase(metrics, "minmax")
    drawn = (
        ("monitor/verdict_balanced_accuracy", "verdicts (balanced accuracy)", _BLUE, "-"),
        ("monitor/evidence_valid_rate", "evidence valid", _GREEN, ":"),
    )
    for key, label, color, linestyle in drawn:
        _line(axes, rows, key, color=color, linestyle=linestyle, label=label)
        _final_mark(axes, rows, results.get("after"), key, color)
    _label_marks(axes, "held-out")
    axes.axhline(0.5, color=_GREY, linewidth=1, linestyle="--", label="coin flip")
    _unit_axis(axes)
    _legend(axes, columns=2)


def _dual_panel(axes: Axes, metrics: Rows, results: dict[str, Any]) -> None:
    rows = _phase(metrics, "minmax")
    _line(axes, rows, "dual/lambda", color=_PURPLE, label="λ (left)")
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="y", colors=_PURPLE)
    axes.set_xlabel("step")
    right = axes.twinx()
    right.grid(False)
    right.spines["right"].set_visible(True)
    right.tick_params(axis="y", colors=_GREEN)
    _line(
        right,
        rows,
        "constraint/violation_ema",
        color=_GREEN,
        linestyle=":",
        label="violation, smoothed (right)",
    )
    right.set_ylim(bottom=0)
    handles = [line for side in (axes, right) for line in side.get_legend_handles_labels()[0]]
    _legend(axes, columns=2, handles=handles)


_PANELS: dict[str, tuple[str, Callable[[Axes, Rows, dict[str, Any]], None]]] = {
    "policy": ("Policy: accuracy and hack rate", _policy_panel),
    "trade": ("Reward score against truth", _trade_panel),
    "monitor": ("Monitor", _monitor_panel),
    "dual": ("Multiplier λ and violation", _dual_panel),
}


def _key_panel(axes: Axes, metrics: Rows, key: str) -> None:
    phases = list(dict.fromkeys(row.get("phase") for row in metrics))
    for index, phase in enumerate(phases):
        rows = [row for row in metrics if row.get("phase") == phase]
        label = None if phase is None else str(phase)
        _line(axes, rows, key, label=label, color=f"C{index}", marker="." if len(rows) < 50 else "")
    if not axes.lines:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=_GREY)
    axes.set_title(key, parse_math=False)
    axes.set_xlabel("step")
    if len(phases) > 1:
        _legend(axes, columns=2)


def _line(axes: Axes, rows: Rows, key: str, **style: Any) -> None:
    points = _pairs(rows, "step", key)
    if points:
        axes.plot(*_columns(points), **style)


def _final_mark(axes: Axes, rows: Rows, block: dict[str, Any] | None, key: str, color: str) -> None:
    """Mark the held-out value of a finished phase at its last step."""
    final, points = _value(block or {}, key), _pairs(rows, "step", key)
    if final is not None and points:
        axes.plot(points[-1][0], final, color=color, marker="o", markersize=8, clip_on=False, zorder=4)


def _label_marks(axes: Axes, label: str) -> None:
    """Explain the round marks in the legend, where there are any."""
    if any(line.get_marker() == "o" for line in axes.lines):
        axes.plot([], [], color=_GREY, linestyle="none", marker="o", markersize=7, label=label)


def _unit_axis(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("step")


def _legend(axes: Axes, *, columns: int, handles: list[Any] | None = None) -> None:
    from matplotlib.transforms import offset_copy

    handles = handles if handles is not None else axes.get_legend_handles_labels()[0]
    if handles:
        axes.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            bbox_transform=offset_copy(axes.transAxes, fig=axes.get_figure(root=True), y=-40, units="points"),
            ncols=columns,
            columnspacing=1.0,
            handlelength=1.5,
            borderaxespad=0.2,
        )


def _phase(metrics: Rows, phase: str) -> Rows:
    return [row for row in metrics if row.get("phase") == phase]


def _value(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _pairs(rows: Rows, x_key: str, y_key: str) -> list[tuple[float, float]]:
    both = [(_value(row, x_key), _value(row, y_key)) for row in rows]
    return [(x, y) for x, y in both if x is not None and y is not None]


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _styled() -> Any:
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def _new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))


def _save_png(figure: Figure, path: str | Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
