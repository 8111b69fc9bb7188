"""Figures are drawn whatever a run recorded, as PNG files of the expected shape."""

import struct

import numpy as np
import pytest

from rlhf_eval import minmax_figure
from rlhf_eval.plots import minmax_panel_svgs

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
        "eval/policy/accuracy": 0.6 if step == 2 else None,
    }
    for phase in ("plain", "minmax")
    for step in range(1, 4)
]


def png_size(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_minmax_figure_is_one_png(tmp_path):
    path = tmp_path / "plots" / "minmax.png"
    minmax_figure(METRICS, RESULTS, path)
    width, height = png_size(path)
    assert width > height > 800
    assert [file.name for file in path.parent.iterdir()] == ["minmax.png"]


@pytest.mark.parametrize("plain", [None, {}])
def test_panels_without_baseline_or_values(plain):
    rows = [row for row in METRICS if row["phase"] == "minmax"]
    nulls = [{"phase": "minmax", "step": 1, "policy/accuracy": None, "dual/lambda": float("nan")}]
    for metrics in (rows, nulls, []):
        panels = minmax_panel_svgs(metrics, {**RESULTS, "plain": plain})
        assert len(panels) == 4
        assert all("<svg" in svg for svg in panels.values())


def test_panels_are_reproducible():
    assert minmax_panel_svgs(METRICS, RESULTS) == minmax_panel_svgs(METRICS, RESULTS)


def test_held_out_marks_stand_at_the_last_step_and_are_explained_only_where_drawn():
    from matplotlib.figure import Figure

    from rlhf_eval.plots import _policy_panel

    rows = [{**row, "eval/policy/accuracy": None} for row in METRICS]
    for results, expected in (
        (RESULTS, [([3.0], [0.3]), ([3.0], [0.98]), ([], [])]),
        ({}, []),
    ):
        axes = Figure().subplots()
        _policy_panel(axes, rows, results)
        marks = [line for line in axes.lines if line.get_marker() == "o"]
        drawn = [(np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in marks]
        assert [(x.tolist(), y.tolist()) for x, y in drawn] == expected
        assert ["held-out accuracy"] * bool(expected) == [line.get_label() for line in marks[2:]]
