"""Both players, constraints and dynamics are drawn from the rows that have them."""

import numpy as np
import pytest

from rlhf_minmax.report.trajectories import constraint_names, constraint_panels, phase_panel, player_panels

NAN = float("nan")
ROWS = [
    {"phase": "plain", "step": 1, "policy/kl": 0.5, "policy/entropy": 0.25, "policy/updates": 2},
    {"phase": "minmax", "step": 1, "policy/kl": None, "monitor/kl": 0.0, "monitor/entropy": NAN},
    {"phase": "minmax", "step": 2, "policy/kl": 0.125, "monitor/kl": 2.0, "dynamics/time_scale": 2.5},
    {"phase": "minmax", "step": 3, "policy/kl": 0.25, "monitor/kl": 4.0, "dynamics/time_scale": 0.0},
]


def lines_of(axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist())
        for line in axes.lines
    }


def test_players_stand_in_one_panel_per_measure(drawn):
    panels = player_panels(ROWS)
    # A logarithmic axis has no place for the monitor's 0 at step 1.
    (axes,) = drawn["KL to the reference"]
    assert lines_of(axes) == {
        "plain RLHF": ([1.0], [0.5]),
        "policy": ([2.0, 3.0], [0.125, 0.25]),
        "monitor": ([2.0, 3.0], [2.0, 4.0]),
    }
    assert axes.get_yscale() == "log"
    assert lines_of(drawn["Entropy"][0]) == {"plain RLHF": ([1.0], [0.25])}
    assert drawn["Entropy"][0].get_yscale() == "linear"
    measured = {"KL to the reference", "Entropy", "Updates done", "Time scale"}
    assert {title for title, panel in panels.items() if panel is not None} == measured
    assert set(panels) - measured == {"Clip fraction", "Gradient norm", "Truncated share", "Update ratio"}


def test_time_scale_stands_between_the_bounds_of_a_frozen_player(drawn):
    player_panels(ROWS)
    curve, low, high = drawn["Time scale"][0].lines
    assert curve.get_xydata().tolist() == [[2.0, 2.5]]
    assert [line.get_ydata()[0] for line in (low, high)] == [0.1, 10.0]


def test_players_of_a_run_without_rows():
    assert set(player_panels([]).values()) == {None}


def test_every_constraint_of_the_rows_has_a_panel_with_its_threshold(drawn):
    rows = [
        {"phase": "minmax", "step": 1, "dual/lambda": 9.0, "dual/a/lambda": 1.0, "dual/a/log_lambda": 0.0},
        {
            "phase": "minmax",
            "step": 2,
            "dual/a/lambda": 2.0,
            "constraint/a/violation_ema": 0.5,
            "dual/$x/lambda": 3.0,
        },
        {"phase": "plain", "step": 1, "dual/b/lambda": 1.0},
    ]
    assert constraint_names(rows) == ["a", "$x"]
    assert constraint_panels(rows, {"a": 0.25}) == ["a", "$x"]
    left, right = drawn["a"]
    assert lines_of(left) == {"λ (left)": ([1.0, 2.0], [1.0, 2.0])}
    assert lines_of(right) == {
        "threshold 0.25": ([0, 1], [0.25, 0.25]),
        "violation, smoothed (right)": ([2.0], [0.5]),
    }
    left, right = drawn["$x"]
    assert lines_of(left) == {"λ (left)": ([2.0], [3.0])} and not right.lines


def test_phase_plot_goes_from_the_first_step_to_the_last(drawn):
    keys = ("step", "policy/accuracy", "monitor/verdict_balanced_accuracy")
    values = [(1, 0.5, 0.25), (2, None, 0.5), (3, 0.75, 0.5), (4, 1.0, 0.875), (5, 0.5, NAN)]
    rows = [{"phase": "minmax", **dict(zip(keys, row, strict=True))} for row in values]
    phase_panel([*rows, {"phase": "plain", "step": 9, "policy/accuracy": 0.0}])
    axes, _ = drawn["Policy against monitor"]  # the second is the scale of the colours
    path, start, end, _ = axes.lines
    assert path.get_xydata().tolist() == [[0.5, 0.25], [0.75, 0.5], [1.0, 0.875]]
    assert axes.collections[0].get_array().tolist() == [1, 3, 4]
    assert (start.get_label(), start.get_xdata()[0], start.get_ydata()[0]) == ("start (step 1)", 0.5, 0.25)
    assert (end.get_label(), end.get_xdata()[0], end.get_ydata()[0]) == ("end (step 4)", 1.0, 0.875)
    assert start.get_marker() != end.get_marker()


def test_phase_plot_needs_both_values():
    assert phase_panel(ROWS) is None


@pytest.mark.parametrize("count", [1, 3])
def test_panels_are_documents_without_raster_images(count):
    rows = [
        {"phase": "minmax", "step": step, "policy/accuracy": 0.5, "monitor/verdict_balanced_accuracy": 0.6}
        for step in range(1, count + 1)
    ]
    panel = phase_panel(rows)
    assert panel is not None
    assert panel.svg.endswith("</svg>\n") and "<image" not in panel.svg
