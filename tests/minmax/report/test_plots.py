"""Figures are drawn whatever a run recorded, as PNG files of the expected shape."""

import numpy as np
import pytest

from files import png_size
from proofs import by_default
from rlhf_minmax import minmax_figure
from rlhf_minmax.report.panels import _trade_panel, draw_multiplier, minmax_panels

RESULTS = {
    "before": {"policy/accuracy": 0.6, "policy/reward_score": 0.0},
    "plain": {"policy/accuracy": 0.3, "policy/reward_score": 0.6},
    "after": {
        "policy/accuracy": 0.98,
        "policy/reward_score": -0.5,
        "monitor/verdict_balanced_accuracy": 0.97,
        "monitor/evidence_valid_rate": 1.0,
    },
}
METRICS = [
    {
        "phase": phase,
        "step": step,
        "policy/accuracy": 0.5,
        "policy/hack_rate": None,
        "policy/reward_score": 0.1 * step,
        "monitor/verdict_balanced_accuracy": 0.7,
        "monitor/evidence_valid_rate": 0.9,
        "dual/lambda": 1.0 + step,
        "constraint/violation_ema": 0.3,
        "eval_policy/accuracy": 0.6 if step == 2 else None,
    }
    for phase in ("plain", "minmax")
    for step in range(1, 4)
]


def test_minmax_figure_is_one_png(tmp_path):
    path = tmp_path / "plots" / "minmax.png"
    minmax_figure(METRICS, RESULTS, path)
    width, height = png_size(path)
    assert width > height > 800
    assert [file.name for file in path.parent.iterdir()] == ["minmax.png"]


@pytest.mark.parametrize("plain", by_default([None, {}], {}))
def test_panels_without_baseline_or_values(plain):
    rows = [row for row in METRICS if row["phase"] == "minmax"]
    nulls = [{"phase": "minmax", "step": 1, "policy/accuracy": None, "dual/lambda": float("nan")}]
    for metrics in (rows, nulls, []):
        panels = minmax_panels(metrics, {**RESULTS, "plain": plain})
        assert len({panel.title for panel in panels}) == 4
        assert all("<svg" in panel.svg for panel in panels)


def test_panels_are_reproducible():
    assert minmax_panels(METRICS, RESULTS) == minmax_panels(METRICS, RESULTS)


def test_held_out_marks_stand_at_the_last_step_and_are_explained_only_where_drawn():
    from matplotlib.figure import Figure

    from rlhf_minmax.report.panels import _policy_panel

    rows = [{**row, "eval_policy/accuracy": None} for row in METRICS]
    for results, expected in ((RESULTS, [([3.0], [0.3]), ([3.0], [0.98]), ([], [])]), ({}, [])):
        axes = Figure().subplots()
        _policy_panel(axes, rows, results)
        marks = [line for line in axes.lines if line.get_marker() == "o"]
        drawn = [(np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in marks]
        assert [(x.tolist(), y.tolist()) for x, y in drawn] == expected
        assert ["held-out accuracy"] * bool(expected) == [line.get_label() for line in marks[2:]]


def lines_of(axes):
    return {
        line.get_label(): (
            np.asarray(line.get_xdata()).tolist(),
            np.asarray(line.get_ydata()).tolist(),
            line.get_marker(),
        )
        for line in axes.lines
    }


@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_held_out_rewards_stand_against_the_accuracy_measured_with_them(prefix):
    from matplotlib.figure import Figure

    rows = [
        {
            "phase": "minmax",
            "step": 1,
            f"{prefix}minmax/heldout_reward": -0.25,
            f"{prefix}policy/accuracy": 0.5,
        },
        {
            "phase": "minmax",
            "step": 2,
            f"{prefix}minmax/heldout_reward": None,
            f"{prefix}policy/accuracy": 0.6,
        },
        {
            "phase": "minmax",
            "step": 3,
            f"{prefix}minmax/heldout_reward": 0.75,
            f"{prefix}policy/accuracy": 1.0,
        },
    ]
    axes = Figure().subplots()
    _trade_panel(axes, rows, {})
    assert lines_of(axes)["MinMax, held-out reward"] == ([-0.25, 0.75], [0.5, 1.0], "x")
    axes = Figure().subplots()
    _trade_panel(axes, METRICS, {})
    assert "MinMax, held-out reward" not in lines_of(axes)


def test_multiplier_and_violation_have_axes_of_their_own():
    from matplotlib.figure import Figure

    figure = Figure()
    rows = [{"step": 4, "l": 2.0, "v": 0.25}, {"step": 5, "l": 3.0, "v": float("nan")}]
    draw_multiplier(figure.subplots(), rows, multiplier="l", violation="v", threshold=0.125)
    left, right = figure.axes
    assert lines_of(left) == {"λ (left)": ([4.0, 5.0], [2.0, 3.0], "None")}
    assert lines_of(right) == {
        "threshold 0.125": ([0, 1], [0.125, 0.125], "None"),
        "violation, smoothed (right)": ([4.0], [0.25], "."),  # one value is a dot, not an invisible line
    }


def test_colours_of_panels_follow_the_readers_preference():
    svg = minmax_panels(METRICS, RESULTS)[0].svg
    drawing, rules = svg.split("</style>", 1)[1], svg.split("</style>", 1)[0]
    assert "@media(prefers-color-scheme:dark)" in rules and "#0072B2" in rules and "#56B4E9" in rules
    assert "var(--c" in drawing
    assert "#0072b2" not in drawing.lower()
