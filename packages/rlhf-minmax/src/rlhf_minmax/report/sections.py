"""The figures of the report, in sections; each lists the measurements that the run lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_eval.figures import Panel, Rows, figure_grid
from rlhf_eval.html import breakable, number, table, text
from rlhf_minmax.report.outcome import (
    calibration_panel,
    cross_play_panel,
    exploitability_panels,
    hacking_panel,
)
from rlhf_minmax.report.panels import minmax_panels
from rlhf_minmax.report.trajectories import constraint_names, constraint_panels, phase_panel, player_panels

_CALLS = "validator/calls"
_CONSTRAINT_FACTS = (
    ("dual/{}/lambda", "λ"),
    ("constraint/{}/violation_ema", "Violation"),
)


def training(metrics: Rows, results: dict[str, Any]) -> str:
    """The panels of `minmax_figure`, the path of both players, and the held-out reward, HTML."""
    extra = {
        "policy accuracy against the monitor's": phase_panel(metrics),
        "the reward of a held-out reward model": hacking_panel(metrics),
    }
    return figure_grid([*minmax_panels(metrics, results), *_drawn(extra)]) + _missing(extra)


def players(metrics: Rows) -> str:
    """Both players over the steps, HTML."""
    panels = player_panels(metrics)
    return figure_grid(_drawn(panels), small=True) + _missing(panels)


def constraints(metrics: Rows, config: dict[str, Any]) -> str:
    """Every constraint the rows name: where it ended, and its multiplier over the steps, HTML."""
    names = constraint_names(metrics)
    if not names:
        return '<p class="soft">The metrics of this run name no constraints.</p>'
    thresholds = _thresholds(config)
    last = {key: value for row in metrics if row.get("phase") == "minmax" for key, value in row.items()}
    rows = [
        [
            f"<code>{breakable(name)}</code>",
            number(thresholds.get(name)),
            *(number(last.get(key.format(name))) for key, _ in _CONSTRAINT_FACTS),
        ]
        for name in names
    ]
    head = ["At the end", "Limit", *(title for _, title in _CONSTRAINT_FACTS)]
    note = "The violation is the smoothed one, which moves λ unless λ is fixed."
    return (
        table(head, rows, numeric=True)
        + f'<p class="soft">{note}</p>'
        + figure_grid(constraint_panels(metrics, thresholds), small=True)
    )


def validator(metrics: Rows, results: dict[str, Any], config: dict[str, Any]) -> str:
    """How many checks a validator made, in all and per answer of the policy, HTML; nothing without one."""
    calls = [row[_CALLS] for row in metrics if row.get(_CALLS) is not None]
    if not calls:
        return ""
    total, answers = sum(calls), _sampled_answers(len(calls), results, config)
    rows = [["Checks in all", f"{total:,}"]]
    if answers:
        rows += [
            ["Answers of the policy", f"{answers:,}"],
            ["Checks for both players, per answer", number(total / answers, 2)],
        ]
    return "<p>While training, of the critiques for both players; each check is a call.</p>" + table(
        ["", "Number"], rows, numeric=True, narrow=True
    )


def _sampled_answers(steps: int, results: dict[str, Any], config: dict[str, Any]) -> int | None:
    """Answers of the policy in that many steps; the last step of an epoch has the remaining stories."""
    stories = (results.get("labels") or {}).get("stories")
    size = (config.get("training") or {}).get("batch_size")
    group = (config.get("game") or {}).get("num_generations")
    if not (stories and size and group):
        return None
    epochs, more = divmod(steps, math.ceil(stories / size))
    return group * (epochs * stories + more * size)


def outcome(metrics: Rows, results: dict[str, Any]) -> str:
    """Calibration, exploitability and cross-play, HTML."""
    exploitability = exploitability_panels(metrics, results)
    others = {
        "the monitor's calibration": calibration_panel(results),
        "cross-play": cross_play_panel(results),
    }
    unmeasured = others | {"exploitability": next(iter(exploitability), None)}
    return figure_grid([*exploitability, *_drawn(others)]) + _missing(unmeasured)


def _thresholds(config: dict[str, Any]) -> dict[str, float | None]:
    """The threshold of each constraint by its name in metrics."""
    return {"truthfulness": (config.get("constraint") or {}).get("threshold")}


def _drawn(panels: Mapping[str, Panel | None]) -> list[Panel]:
    return [panel for panel in panels.values() if panel is not None]


def _missing(panels: Mapping[str, Panel | None]) -> str:
    names = [name for name, panel in panels.items() if panel is None]
    return f'<p class="soft">Not measured on this run: {text(", ".join(names))}.</p>' if names else ""
