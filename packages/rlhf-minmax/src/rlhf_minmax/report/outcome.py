"""Figures of the outcome of a MinMax run: calibration, exploitability, cross-play, reward hacking."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_eval.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    Panel,
    Rows,
    add_colorbar,
    add_legend,
    draw_line,
    finite,
    make_panel,
    of_phase,
    pairs,
    step_axis,
    value_of,
)
from rlhf_minmax.report.panels import held_out_prefix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STAGES = (("before", "start", GREY, "s", ":"), ("after", "end", BLUE, "o", "-"))
"""Block of results.json, label, colour, marker, line style."""
_EXPLOITABILITY = "minmax/exploitability"
_GAINS = (
    ("policy/best_of_n_gain", "policy's gain", BLUE),
    ("monitor/worst_of_k_gain", "monitor's gain", GREEN),
)
_HELD_OUT, _GAP = "minmax/heldout_reward", "minmax/hacking_gap"
_HEAT, _WRITTEN = "cividis", {True: "#FDFDFD", False: "#101010"}
"""Colours of a heat map, the same on light and on dark pages, and of values on its dark cells and others."""
_MOST_WRITTEN = 8
"""Columns of a heat map up to which the values are written into its cells."""


def calibration_panel(results: dict[str, Any]) -> Panel | None:
    """The monitor's calibration curve at the start and at the end; None if neither was measured.

    Args:
        results: The content of results.json; `monitor/calibration` of `before` and `after` is a list of bins
            with `predicted` and `observed` in [0, 1], null in an empty bin, and `count`.
    """
    curves = {block: _bins(results.get(block) or {}) for block, *_ in _STAGES}
    if not any(curves.values()):
        return None
    return make_panel(
        "Monitor's calibration on the probe",
        "How often answers are right, against the probability of it that the monitor gave. On the dashed "
        "line it keeps what it promises, above it the monitor doubts too much. Larger marks: more critiques.",
        partial(_draw_calibration, curves=curves),
    )


def _bins(block: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Predicted and observed frequency and count of the bins that are not empty."""
    listed = block.get("monitor/calibration") or []
    found = [tuple(value_of(each, key) for key in ("predicted", "observed", "count")) for each in listed]
    return [(x, y, n) for x, y, n in found if x is not None and y is not None and n]


def _draw_calibration(axes: Axes, *, curves: dict[str, list[tuple[float, float, float]]]) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    for block, label, color, marker, style in _STAGES:
        bins = curves[block]
        if bins:
            x, y, count = zip(*bins, strict=True)
            total = sum(count)
            sizes = [20 + 160 * n / total for n in count]
            axes.plot(x, y, color=color, linestyle=style, marker=marker, markersize=3, label=label)
            axes.scatter(x, y, s=sizes, color=color, marker=marker, alpha=0.55, zorder=3, clip_on=False)
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel('predicted probability of "right"')
    axes.set_ylabel("share of right answers")
    add_legend(axes, columns=2)


def exploitability_panels(metrics: Rows, results: dict[str, Any]) -> list[Panel]:
    """Exploitability at the start and at the end as bars, and over the steps as a line, where measured.

    Args:
        metrics: Rows of metrics.jsonl; `eval_minmax/exploitability` is the line.
        results: The content of results.json; `minmax/exploitability` of `before` and `after` are the bars,
            split into both players' gains where the blocks have them.
    """
    panels: list[Panel] = []
    blocks = [(label, results.get(block) or {}) for block, label, *_ in _STAGES]
    blocks = [(label, block) for label, block in blocks if value_of(block, _EXPLOITABILITY) is not None]
    if blocks:
        caption = (
            "What the players could gain by changing alone, on held-out stories: a proxy of the duality gap. "
            "Lower is better; compare only with equal numbers of samples."
        )
        panels.append(make_panel("Exploitability", caption, partial(_draw_bars, blocks=blocks)))
    rows = of_phase(metrics, "minmax")
    key = f"eval_{_EXPLOITABILITY}"
    if pairs(rows, "step", key):
        caption = "The same at the held-out evaluations during training. It falls where both players settle."
        panels.append(
            make_panel("Exploitability over the steps", caption, partial(_draw_gap, rows=rows, key=key))
        )
    if probes := results.get("past_best_responses") or []:
        caption = (
            "What a few more updates of one player gain against the other one as it was at that step. Both "
            "near 0: the players have settled. The monitor's alone above 0: the policy's value rests on a "
            "weak monitor."
        )
        panels.append(
            make_panel("Best responses over the steps", caption, partial(_draw_probes, rows=probes))
        )
    return panels


def _draw_bars(axes: Axes, *, blocks: Sequence[tuple[str, dict[str, Any]]]) -> None:
    labels = [label for label, _ in blocks]
    totals = [block[_EXPLOITABILITY] for _, block in blocks]
    parts = [[value_of(block, key) for _, block in blocks] for key, _, _ in _GAINS]
    policy, monitor = ([value for value in part if value is not None] for part in parts)
    if len(policy) == len(monitor) == len(blocks):
        for part, below, (_, label, color) in zip((policy, monitor), (0.0, policy), _GAINS, strict=True):
            axes.bar(labels, part, bottom=below, color=color, width=0.5, label=label)
    else:
        axes.bar(labels, totals, color=BLUE, width=0.5)
    for index, total in enumerate(totals):
        axes.annotate(f"{total:z.3f}", (index, total), (0, 4), textcoords="offset points", ha="center")
    axes.set_xlim(-0.6, len(blocks) - 0.4)
    axes.margins(y=0.15)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("standard deviations")
    add_legend(axes, columns=2)


def _draw_gap(axes: Axes, *, rows: Rows, key: str) -> None:
    draw_line(axes, rows, key, color=BLUE, marker="o", markersize=5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("standard deviations")
    step_axis(axes)


def _draw_probes(axes: Axes, *, rows: Rows) -> None:
    for role, color, style, marker in (("policy", ORANGE, "-", "o"), ("monitor", BLUE, "--", "s")):
        key = f"{role}/best_response_gain"
        draw_line(axes, rows, key, color=color, linestyle=style, marker=marker, markersize=5, label=role)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.set_ylabel("standard deviations")
    step_axis(axes)
    add_legend(axes, columns=2)


def cross_play_panel(results: dict[str, Any]) -> Panel | None:
    """The game's value of every past policy against every past monitor, as a heat map.

    Args:
        results: The content of results.json; `cross_play` has `policy_steps` (P), `monitor_steps` (M),
            `values` (P rows of M, null where not played) and `accuracy` (P).
    """
    table = results.get("cross_play") or {}
    if all(finite(value) is None for row in table.get("values") or [] for value in row):
        return None
    return make_panel(
        "Cross-play",
        "The game's value of each policy (rows) against each monitor (columns). A policy that learned "
        "something lasting does well along its whole row; bright cells on the diagonal only mean that the "
        "players run in circles.",
        partial(_draw_cross_play, table=table),
        height=2.1 + 0.42 * min(len(table["values"]), 12),
    )


def _draw_cross_play(axes: Axes, *, table: dict[str, Any]) -> None:
    import numpy as np

    # None, a game that was not played, becomes NaN.
    values = np.ma.masked_invalid(np.array(table["values"], dtype=float))
    rows, columns = values.shape
    mesh = axes.pcolormesh(values, cmap=_HEAT)
    middle = (values.min() + values.max()) / 2
    shares = [finite(share) for share in table.get("accuracy") or [None] * rows]
    axes.set_xticks(np.arange(columns) + 0.5, [str(step) for step in table["monitor_steps"]])
    axes.set_yticks(
        np.arange(rows) + 0.5,
        [
            str(step) if share is None else f"{step} ({share:.2f})"
            for step, share in zip(table["policy_steps"], shares, strict=True)
        ],
    )
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("step of the monitor")
    axes.set_ylabel("step of the policy\n(its true accuracy)")
    if columns > _MOST_WRITTEN:
        add_colorbar(axes, mesh, "game value")
        return
    for (row, column), value in np.ndenumerate(values.filled(np.nan)):
        axes.text(
            column + 0.5,
            row + 0.5,
            "–" if np.isnan(value) else f"{value:z.2f}".replace("-", "−"),
            color=GREY if np.isnan(value) else _WRITTEN[bool(value <= middle)],
            ha="center",
            va="center",
            fontsize=10.5,
        )


def hacking_panel(metrics: Rows) -> Panel | None:
    """The game's reward score, that of a held-out reward model, and the hacking gap over the steps.

    Args:
        metrics: Rows of metrics.jsonl; `minmax/heldout_reward` and `minmax/hacking_gap`, of every step or of
            the held-out evaluations (`eval_` in front); None if there are neither.
    """
    rows = of_phase(metrics, "minmax")
    prefixes = [held_out_prefix(rows, key) for key in (_HELD_OUT, _GAP)]
    prefix = next((each for each in prefixes if each is not None), None)
    if prefix is None:
        return None
    return make_panel(
        "Hacking: trained-on against held-out reward",
        "In standard deviations of the scores at the start. Where the reward model's score rises and the "
        "held-out one does not, the reward is being hacked: the gap grows.",
        partial(_draw_hacking, rows=rows, prefix=prefix),
    )


def _draw_hacking(axes: Axes, *, rows: Rows, prefix: str) -> None:
    for key, label, color, style, marker in (
        ("policy/reward_score", "reward model", ORANGE, "-", "o"),
        (_HELD_OUT, "held-out reward model", GREEN, "--", "x"),
        (_GAP, "hacking gap", PURPLE, ":", "s"),
    ):
        marks = {"marker": marker, "markersize": 5} if prefix else {}
        draw_line(axes, rows, prefix + key, color=color, linestyle=style, label=label, **marks)
    axes.axhline(0, color=GREY, linewidth=1)
    step_axis(axes)
    add_legend(axes, columns=2)
