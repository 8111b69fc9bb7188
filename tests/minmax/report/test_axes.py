"""Axes can be read: every logarithmic one has labels, and no two ticks of a curve say the same."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from rlhf_eval.curves import _label
from rlhf_minmax.report.trajectories import _draw_lines


@pytest.mark.parametrize("decades", [1, 3, 6, 9])
def test_gradient_norms_over_many_decades_have_labels(decades: int) -> None:
    axes = Figure().subplots()
    rows = [{"step": step, "norm": 29.0 * 10 ** (-decades * step / 40)} for step in range(1, 41)]
    _draw_lines(axes, lines=[(rows, "norm", {"color": "k", "label": "norm"})], log=True, bounds=())
    low, high = axes.get_ylim()
    assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) >= 2


def test_ticks_that_lie_close_are_told_apart() -> None:
    ticks = [0.69305, 0.6931, 0.69315, 0.6932]
    assert [_label(tick, ticks) for tick in ticks] == ["0.69305", "0.6931", "0.69315", "0.6932"]
    assert _label(0.5, [0.0, 0.5, 1.0]) == "0.5"
    assert _label(1e-6, [0.0, 1e-6]) == "1e-06"
