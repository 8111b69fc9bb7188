"""Curves of all runs in one figure each: the metric over steps and tokens, the KL, the metric against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_eval.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, Panel, add_legend, make_panel
from rlhf_eval.run_comparison import RunCurves, metric_over_kl, smoothed

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, GREY)
_LINES = ("-", "--", ":", "-.")
_MARKED = 12

Line = tuple[np.ndarray, np.ndarray]


def run_panels(
    groups: Sequence[str], runs: Sequence[RunCurves], metric: str, kl: str | None, better: str | None
) -> list[Panel]:
    """Panels for a page, those without a line left out; runs of one group share a colour.

    `better` is `up` or `down`; None if runs cannot be compared by the metric.
    """
    wanted: list[tuple[str, str, str, Callable[[RunCurves], Line]]] = [
        (f"{metric} over steps", "step", metric, lambda run: (run.metric.steps, smoothed(run))),
        (f"{metric} over tokens", "tokens", metric, _over_tokens),
        (f"{kl} over steps", "step", str(kl), _kl_over_steps),
    ]
    if better is not None:
        title = f"{metric} against √{kl}, {better} and to the left is better"
        wanted.append((title, f"√{kl}", metric, _over_kl))
    panels = []
    for title, x_label, y_label, line_of in wanted:
        lines = [line_of(run) for run in runs]
        if any(len(x) for x, _ in lines):
            draw = _drawn(groups, lines, x_label, y_label)
            panels.append(make_panel(title, f"{title}; one line per run", draw, height=4.2))
    return panels


def _kl_over_steps(run: RunCurves) -> Line:
    """From 0 at the start."""
    if not len(run.kl):
        return run.kl.steps, run.kl.values
    return np.array([0.0, *run.kl.steps]), np.array([0.0, *run.kl.values])


def _over_tokens(run: RunCurves) -> Line:
    """From 0 at the start, where it was measured there."""
    tokens = np.array([run.tokens.at(step) if step else 0.0 for step in run.metric.steps])
    known = np.isfinite(tokens)
    return tokens[known], smoothed(run)[known]


def _over_kl(run: RunCurves) -> Line:
    kls, values = metric_over_kl(run)
    return np.sqrt(np.maximum(kls, 0)), values


def _drawn(groups: Sequence[str], lines: Sequence[Line], x_label: str, y_label: str) -> Callable[[Any], None]:
    order = list(dict.fromkeys(groups))

    def draw(axes: Any) -> None:
        named: set[str] = set()
        for group, (x, y) in zip(groups, lines, strict=True):
            if not len(x):
                continue
            at = order.index(group)
            axes.plot(
                x,
                y,
                color=_COLOURS[at % len(_COLOURS)],
                linestyle=_LINES[at // len(_COLOURS) % len(_LINES)],
                marker="." if len(x) < _MARKED else "",
                alpha=0.8,
                label=f"_{group}" if group in named else group.replace("$", r"\$").lstrip("_"),
            )
            named.add(group)
        axes.set_xlabel(x_label, parse_math=False)
        axes.set_ylabel(y_label, parse_math=False)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
        if len(order) > 1:
            add_legend(axes, columns=min(3, len(order)))

    return draw


def _short(value: float) -> str:
    """A tick's number: 0.15, 200, 20k, 2M."""
    factor, unit = next(((f, u) for f, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= f), (1, ""))
    return f"{value / factor:g}{unit}"
