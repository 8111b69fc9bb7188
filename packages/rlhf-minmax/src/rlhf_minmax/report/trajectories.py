"""Both players, their constraints and their dynamics over the steps of a MinMax run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_eval.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAPER,
    Panel,
    Rows,
    add_colorbar,
    add_legend,
    columns_of,
    draw_line,
    make_panel,
    of_phase,
    pairs,
    step_axis,
    value_of,
)
from rlhf_minmax.report.panels import draw_multiplier

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = (
    ("plain", "policy", {"label": "plain RLHF", "color": ORANGE, "linestyle": ":"}),
    ("minmax", "policy", {"label": "policy", "color": BLUE, "linestyle": "-"}),
    ("minmax", "monitor", {"label": "monitor", "color": GREEN, "linestyle": "--"}),
)
"""Phase, player, how it is drawn."""
_MEASURES = (
    ("kl", "KL to the reference", "k3 divergence in nats per token, at a step's last update.", True),
    ("entropy", "Entropy", "Nats per sampled token. At 0 nothing is explored any more.", False),
    ("clip_fraction", "Clip fraction", "Share of tokens without gradient because of the clipping.", False),
    ("grad_norm", "Gradient norm", "2-norm before clipping, at a step's last update.", True),
    ("updates", "Updates done", "Updates on a step's batch; the KL stop ends them early.", False),
    ("truncated_rate", "Truncated share", "Share of answers and critiques cut off at their limit.", False),
)
"""Measure of a player, title, caption, whether its axis is logarithmic."""
_TIME_SCALE_BOUNDS = (0.1, 10.0)
"""Beyond these one player is almost frozen (docs/minmax.md, two time scales)."""
_WIDE = 1e4
"""Ratio of a logarithmic axis above which only decades are labelled."""
_SMALL: dict[str, Any] = {"width": 4.2, "height": 3.0}
_SHARES = (-0.03, 1.03)
"""Limits of an axis of shares, with room for markers at its ends."""
_STEP_COLORS = ("#5AA9D6", "#8C8C9B", "#E0701A")
"""Of the first step, the middle and the last; visible on white and on black."""

_Line = tuple[Rows, str, dict[str, Any]]
"""Rows, key, style."""


def player_panels(metrics: Rows) -> dict[str, Panel | None]:
    """One small panel per measure, with both players and plain RLHF; None if no row has it.

    Of rows with `phase`, `step` and `<player>/<measure>`.

    Returns:
        Title -> panel; the last ones are the monitor's updates per update of the policy and the time scale,
        from `dynamics/update_ratio` and `dynamics/time_scale`.
    """
    found = {
        title: _over_steps(
            title,
            caption + (" Zeros are left out." if log else ""),
            [(of_phase(metrics, phase), f"{player}/{measure}", style) for phase, player, style in _LINES],
            log=log,
        )
        for measure, title, caption, log in _MEASURES
    }
    rows, style = of_phase(metrics, "minmax"), {"color": BLUE}
    found["Update ratio"] = _over_steps(
        "Update ratio",
        "The monitor's updates per update of the policy, in each step.",
        [(rows, "dynamics/update_ratio", style)],
    )
    found["Time scale"] = _over_steps(
        "Time scale",
        "Learning rate x updates, monitor over policy, over the run so far. Outside the dashed lines the "
        "slower player is almost frozen.",
        [(rows, "dynamics/time_scale", style)],
        log=True,
        bounds=_TIME_SCALE_BOUNDS,
    )
    return found


def _over_steps(
    title: str, caption: str, lines: Sequence[_Line], *, log: bool = False, bounds: Sequence[float] = ()
) -> Panel | None:
    if log:
        lines = [
            ([row for row in rows if (value_of(row, key) or 0.0) > 0], key, style)
            for rows, key, style in lines
        ]
    if not any(pairs(rows, "step", key) for rows, key, _ in lines):
        return None
    return make_panel(title, caption, partial(_draw_lines, lines=lines, log=log, bounds=bounds), **_SMALL)


def _draw_lines(axes: Axes, *, lines: Sequence[_Line], log: bool, bounds: Sequence[float]) -> None:
    for rows, key, style in lines:
        draw_line(axes, rows, key, **style)
    for bound in bounds:
        axes.axhline(bound, color=GREY, linewidth=1, linestyle="--")
    if log:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        low, high = axes.get_ylim()
        wide = high / low > _WIDE  # then a locator with ticks between the decades gives none at all
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 3.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(bottom=0)
    step_axis(axes)
    add_legend(axes, columns=3)


def constraint_names(metrics: Rows) -> list[str]:
    """The constraints whose multipliers `dual/<name>/lambda` the rows have, in the order they appear."""
    keys = dict.fromkeys(key for row in of_phase(metrics, "minmax") for key in row)
    matches = (re.fullmatch(r"dual/([^/]+)/lambda", key) for key in keys)
    return [match[1] for match in matches if match]


def constraint_panels(metrics: Rows, thresholds: Mapping[str, float | None]) -> list[Panel]:
    """One small panel per constraint: λ, smoothed violation, threshold.

    Thresholds are by name of the constraint; one that is missing is not drawn.
    """
    rows = of_phase(metrics, "minmax")
    return [
        make_panel(
            name,
            f"dual/{name}/lambda and constraint/{name}/violation_ema.",
            partial(
                draw_multiplier,
                rows=rows,
                multiplier=f"dual/{name}/lambda",
                violation=f"constraint/{name}/violation_ema",
                threshold=thresholds.get(name),
            ),
            **_SMALL,
        )
        for name in constraint_names(metrics)
    ]


def phase_panel(metrics: Rows) -> Panel | None:
    """The path of the game: policy accuracy against the monitor's balanced accuracy, coloured by step.

    Of rows of phase "minmax" that have both values.
    """
    keys = ("policy/accuracy", "monitor/verdict_balanced_accuracy", "step")
    rows = [row for row in of_phase(metrics, "minmax") if all(value_of(row, key) is not None for key in keys)]
    if not rows:
        return None
    return make_panel(
        "Policy against monitor",
        "Each dot is a training step, from blue to orange, on sampled answers and critiques. Top right: "
        "true answers and a monitor that tells right from wrong.",
        partial(_draw_phase, rows=rows),
    )


def _draw_phase(axes: Axes, *, rows: Rows) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    x, y = columns_of(pairs(rows, "policy/accuracy", "monitor/verdict_balanced_accuracy"))
    steps = [row["step"] for row in rows]
    colors = LinearSegmentedColormap.from_list("steps", _STEP_COLORS)
    axes.plot(x, y, color=GREY, linewidth=0.8, alpha=0.6)
    dots = axes.scatter(x, y, c=steps, cmap=colors, s=26, zorder=3)
    for at, marker, label in ((0, "s", "start"), (-1, "*", "end")):
        axes.plot(
            x[at],
            y[at],
            color=_STEP_COLORS[at],
            marker=marker,
            markersize=(17 if marker == "*" else 12),
            markeredgecolor=PAPER,
            linestyle="none",
            label=f"{label} (step {steps[at]})",
            zorder=4,
        )
    axes.axhline(0.5, color=GREY, linewidth=1, linestyle="--")
    axes.set(xlim=_SHARES, ylim=_SHARES)
    axes.set_xlabel("policy: true accuracy")
    axes.set_ylabel("monitor: balanced accuracy")
    add_colorbar(axes, dots, "step")
    add_legend(axes, columns=2)
