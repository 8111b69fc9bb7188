"""The four panels of a MinMax run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_eval.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAPER,
    PURPLE,
    Panel,
    Rows,
    add_legend,
    columns_of,
    draw_line,
    make_panel,
    new_figure,
    of_phase,
    pairs,
    save_png,
    step_axis,
    styled,
    value_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ARMS = (("plain", "plain", "plain RLHF", ORANGE), ("minmax", "after", "MinMax", BLUE))
"""Phase of metrics.jsonl, block of results.json, label, colour."""


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
    with styled():
        figure = new_figure(11.2, 8.6)
        for index, (title, _, draw) in enumerate(_PANELS):
            axes = figure.add_subplot(2, 2, index + 1)
            draw(axes, metrics, results)
            axes.set_title(title)
        save_png(figure, path)


def minmax_panels(metrics: Rows, results: dict[str, Any]) -> list[Panel]:
    """Draw the panels of `minmax_figure` one by one, for pages that arrange them by screen width."""
    return [
        make_panel(title, caption, partial(draw, metrics=metrics, results=results))
        for title, caption, draw in _PANELS
    ]


def draw_multiplier(
    axes: Axes, rows: Rows, *, multiplier: str, violation: str, threshold: float | None = None
) -> None:
    """Draw a multiplier (left axis) and its constraint's smoothed violation (right axis) over the steps.

    The threshold is that of the violation; None draws none.
    """
    draw_line(axes, rows, multiplier, color=PURPLE, label="λ (left)")
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="y", colors=PURPLE)
    step_axis(axes)
    right = axes.twinx()
    right.grid(False)
    right.spines["right"].set_visible(True)
    right.tick_params(axis="y", colors=GREEN)
    if threshold is not None:
        right.axhline(threshold, color=GREEN, linewidth=1, linestyle="--", label=f"threshold {threshold:g}")
    draw_line(right, rows, violation, color=GREEN, linestyle=":", label="violation, smoothed (right)")
    right.set_ylim(bottom=0)
    handles = [line for side in (axes, right) for line in side.get_legend_handles_labels()[0]]
    add_legend(axes, columns=2, handles=handles)


def held_out_prefix(rows: Rows, key: str) -> str | None:
    """The prefix of a metric of held-out scorers in the rows: nothing, or `eval_`; None without it."""
    return next((prefix for prefix in ("", "eval_") if pairs(rows, "step", prefix + key)), None)


def _policy_panel(axes: Axes, metrics: Rows, results: dict[str, Any]) -> None:
    for phase, block, label, color in _ARMS:
        rows = of_phase(metrics, phase)
        draw_line(axes, rows, "policy/accuracy", color=color, label=f"accuracy, {label}")
        draw_line(axes, rows, "policy/hack_rate", color=color, linestyle=":", label=f"hack rate, {label}")
        draw_line(axes, rows, "eval_policy/accuracy", color=color, linestyle="none", marker="o", markersize=5)
        _final_mark(axes, rows, results.get(block), "policy/accuracy", color)
    _label_marks(axes, "held-out accuracy")
    start = value_of(results.get("before") or {}, "policy/accuracy")
    if start is not None:
        axes.axhline(start, color=GREY, linewidth=1, linestyle="--", label="accuracy at start")
    _unit_axis(axes)
    add_legend(axes, columns=2)


def _trade_panel(axes: Axes, metrics: Rows, results: dict[str, Any]) -> None:
    keys = ("policy/reward_score", "policy/accuracy")
    for phase, _, _, color in _ARMS:
        points = pairs(of_phase(metrics, phase), *keys)
        axes.plot(*columns_of(points), color=color, alpha=0.45, linewidth=1.2, marker=".", markersize=4)
    _held_out_crosses(axes, of_phase(metrics, "minmax"))
    marks = (
        ("before", "start", GREY, "s"),
        ("plain", "plain RLHF", ORANGE, "X"),
        ("after", "MinMax", BLUE, "o"),
    )
    for block, label, color, marker in marks:
        points = pairs([results.get(block) or {}], *keys)
        if points:
            axes.plot(
                *columns_of(points),
                color=color,
                marker=marker,
                markersize=12,
                markeredgecolor=PAPER,
                linestyle="none",
                label=label,
                zorder=4,
            )
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("reward-model score")
    axes.set_ylabel("true accuracy")
    add_legend(axes, columns=2)


def _held_out_crosses(axes: Axes, rows: Rows) -> None:
    prefix = held_out_prefix(rows, "minmax/heldout_reward")
    if prefix is not None:
        points = pairs(rows, f"{prefix}minmax/heldout_reward", f"{prefix}policy/accuracy")
        axes.plot(
            *columns_of(points), color=GREEN, marker="x", linestyle="none", label="MinMax, held-out reward"
        )


def _monitor_panel(axes: Axes, metrics: Rows, results: dict[str, Any]) -> None:
    rows = of_phase(metrics, "minmax")
    drawn = (
        ("monitor/verdict_balanced_accuracy", "verdicts (balanced accuracy)", BLUE, "-"),
        ("monitor/evidence_valid_rate", "evidence valid", GREEN, ":"),
    )
    for key, label, color, linestyle in drawn:
        draw_line(axes, rows, key, color=color, linestyle=linestyle, label=label)
        _final_mark(axes, rows, results.get("after"), key, color)
    _label_marks(axes, "held-out")
    axes.axhline(0.5, color=GREY, linewidth=1, linestyle="--", label="coin flip")
    _unit_axis(axes)
    add_legend(axes, columns=2)


def _dual_panel(axes: Axes, metrics: Rows, results: dict[str, Any]) -> None:
    del results
    rows = of_phase(metrics, "minmax")
    draw_multiplier(axes, rows, multiplier="dual/lambda", violation="constraint/violation_ema")


_PANELS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    (
        "Policy: accuracy and hack rate",
        "Lines: answers sampled during training. Dots: greedy answers on held-out rows.",
        _policy_panel,
    ),
    (
        "Reward score against truth",
        "Each dot is a training step, the large marks are held-out evaluations. To the right and down: the "
        "reward model is being fooled. Crosses, where there are any, show a reward model that nobody is "
        "trained on.",
        _trade_panel,
    ),
    (
        "Monitor",
        "Lines: critiques written during training. Large marks: held-out evaluation at the end.",
        _monitor_panel,
    ),
    (
        "Multiplier λ and violation",
        "λ, unless it is fixed, rises while the smoothed violation is above its limit and falls below it.",
        _dual_panel,
    ),
)


def _final_mark(axes: Axes, rows: Rows, block: dict[str, Any] | None, key: str, color: str) -> None:
    """Mark the held-out value of a finished phase at its last step."""
    final, points = value_of(block or {}, key), pairs(rows, "step", key)
    if final is not None and points:
        axes.plot(points[-1][0], final, color=color, marker="o", markersize=8, clip_on=False, zorder=4)


def _label_marks(axes: Axes, label: str) -> None:
    """Explain the round marks in the legend, if there are any."""
    if any(line.get_marker() == "o" for line in axes.lines):
        axes.plot([], [], color=GREY, linestyle="none", marker="o", markersize=7, label=label)


def _unit_axis(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.03)
    step_axis(axes)
