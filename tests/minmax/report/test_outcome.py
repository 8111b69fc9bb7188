"""Calibration, exploitability, cross-play and hacking show what the run recorded."""

import numpy as np
import pytest

from rlhf_eval.figures import new_figure
from rlhf_minmax.report.outcome import (
    calibration_panel,
    cross_play_panel,
    exploitability_panels,
    hacking_panel,
)

NAN = float("nan")


def lines_of(axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist())
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def test_calibration_curves_leave_out_empty_bins(drawn):
    full = [
        {"predicted": 0.125, "observed": 0.25, "count": 3},
        {"predicted": None, "observed": None, "count": 0},
        {"predicted": 0.875, "observed": 1.0, "count": 1},
    ]
    calibration_panel({"before": {"monitor/calibration": full[:1]}, "after": {"monitor/calibration": full}})
    (axes,) = drawn["Monitor's calibration on the probe"]
    assert lines_of(axes) == {"start": ([0.125], [0.25]), "end": ([0.125, 0.875], [0.25, 1.0])}
    # Marks are 20 + 160 times the share of critiques: all of them; 3 of 4 and 1 of 4.
    assert [marks.get_sizes().tolist() for marks in axes.collections] == [[180.0], [140.0, 60.0]]


@pytest.mark.parametrize("block", [None, {}, {"monitor/calibration": None}, {"monitor/calibration": []}])
def test_calibration_that_was_not_measured(block):
    assert calibration_panel({"before": block, "after": block}) is None


def test_exploitability_bars_are_the_sum_of_both_gains(drawn):
    gains = {"policy/best_of_n_gain": 0.75, "monitor/worst_of_k_gain": 0.25}
    blocks = {"minmax/exploitability": 1.0, **gains}, {"minmax/exploitability": NAN}
    exploitability_panels([], {"before": blocks[0], "after": blocks[1]})
    (axes,) = drawn["Exploitability"]
    assert [(bar.get_y(), bar.get_height()) for bar in axes.patches] == [(0.0, 0.75), (0.75, 0.25)]
    assert [each.get_text() for each in axes.texts] == ["1.000"]


def test_exploitability_without_the_gains_is_one_bar_each(drawn):
    exploitability_panels(
        [], {"before": {"minmax/exploitability": 1.5}, "after": {"minmax/exploitability": 0.5}}
    )
    (axes,) = drawn["Exploitability"]
    assert [bar.get_height() for bar in axes.patches] == [1.5, 0.5]
    assert [each.get_text() for each in axes.get_xticklabels()] == ["start", "end"]


def test_exploitability_over_the_steps(drawn):
    rows = [
        {"phase": "minmax", "step": step, "eval_minmax/exploitability": value}
        for step, value in ((4, 0.5), (5, None), (8, 0.25))
    ]
    assert exploitability_panels(rows, {"before": None}) == ["Exploitability over the steps"]
    (line,) = drawn["Exploitability over the steps"][0].lines
    assert line.get_xydata().tolist() == [[4.0, 0.5], [8.0, 0.25]]
    assert exploitability_panels([], {}) == []


def test_best_responses_over_the_steps(drawn):
    gains = ("policy/best_response_gain", "monitor/best_response_gain")
    rows = [{"step": 8, gains[0]: 0.5, gains[1]: NAN}, {"step": 16, gains[0]: -0.25, gains[1]: 0.125}]
    titles = exploitability_panels([], {"past_best_responses": rows})
    assert titles == ["Best responses over the steps"]
    assert lines_of(drawn[titles[0]][0]) == {
        "policy": ([8.0, 16.0], [0.5, -0.25]),
        "monitor": ([16.0], [0.125]),
    }
    assert exploitability_panels([], {"past_best_responses": None}) == []


def test_cross_play_has_a_row_per_policy_and_writes_its_values(drawn):
    table = {
        "policy_steps": [0, 8],
        "monitor_steps": [0, 4, 8],
        "values": [[-0.004, -1.25, None], [0.5, 0.25, NAN]],
        "accuracy": [0.25, None],
    }
    cross_play_panel({"cross_play": table})
    (axes,) = drawn["Cross-play"]
    cells = {each.get_position(): each.get_text() for each in axes.texts}
    assert cells == {
        (0.5, 0.5): "0.00",
        (1.5, 0.5): "−1.25",
        (2.5, 0.5): "–",
        (0.5, 1.5): "0.50",
        (1.5, 1.5): "0.25",
        (2.5, 1.5): "–",
    }
    assert [each.get_text() for each in axes.get_xticklabels()] == ["0", "4", "8"]
    assert [each.get_text() for each in axes.get_yticklabels()] == ["0 (0.25)", "8"]
    low, high = axes.get_ylim()
    assert low > high  # the first policy is the top row
    # Light on the dark cells of low values, dark on the others: the middle is (0.5 - 1.25) / 2.
    assert [each.get_color() for each in axes.texts if each.get_text() in ("−1.25", "0.50")] == [
        "#FDFDFD",
        "#101010",
    ]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_labels_of_a_small_cross_play_fit_it(rows, monkeypatch):
    figures = []

    def remember(width, height):
        figures.append(new_figure(width, height))
        return figures[0]

    monkeypatch.setattr("rlhf_eval.figures.new_figure", remember)
    steps = list(range(rows))
    table = {"policy_steps": steps, "monitor_steps": steps, "values": [[0.5] * rows] * rows}
    cross_play_panel({"cross_play": table | {"accuracy": [0.5] * rows}})
    (figure,) = figures
    figure.draw_without_rendering()
    for label in (figure.axes[0].xaxis.label, figure.axes[0].yaxis.label):
        box = label.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height


def test_large_cross_play_has_a_scale_in_place_of_values(drawn):
    steps = list(range(9))
    table = {"policy_steps": [0], "monitor_steps": steps, "values": [steps]}
    cross_play_panel({"cross_play": table})
    axes, scale = drawn["Cross-play"]
    assert not axes.texts and scale.get_ylabel() == "game value"


@pytest.mark.parametrize("table", [None, {}, {"values": []}, {"values": [[None, NAN]]}])
def test_cross_play_that_was_not_measured(table):
    assert cross_play_panel({"cross_play": table}) is None


@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_hacking_shows_both_rewards_and_the_gap(drawn, prefix):
    rows = [
        {
            "phase": "minmax",
            "step": step,
            f"{prefix}policy/reward_score": 0.5 * step,
            f"{prefix}minmax/heldout_reward": 0.25,
            f"{prefix}minmax/hacking_gap": 0.5 * step - 0.25,
        }
        for step in (1, 2)
    ]
    hacking_panel([*rows, {"phase": "minmax", "step": 3, "policy/reward_score": None}])
    assert lines_of(drawn["Hacking: trained-on against held-out reward"][0]) == {
        "reward model": ([1.0, 2.0], [0.5, 1.0]),
        "held-out reward model": ([1.0, 2.0], [0.25, 0.25]),
        "hacking gap": ([1.0, 2.0], [0.25, 0.75]),
    }


def test_hacking_needs_a_held_out_scorer():
    rows = [{"phase": "minmax", "step": 1, "policy/reward_score": 1.0, "minmax/hacking_gap": None}]
    assert hacking_panel(rows) is None


def test_panels_are_documents_without_raster_images():
    steps = list(range(9))
    cross = cross_play_panel({"cross_play": {"policy_steps": [0], "monitor_steps": steps, "values": [steps]}})
    bars = exploitability_panels([], {"after": {"minmax/exploitability": 0.5}})
    for panel in (cross, *bars):
        assert panel is not None and panel.svg.endswith("</svg>\n") and "<image" not in panel.svg
