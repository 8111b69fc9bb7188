"""Axes of panels, to be looked at before they become SVG documents."""

import pytest
from matplotlib.figure import Figure

from rlhf_minmax.report import outcome, trajectories


@pytest.fixture
def drawn(monkeypatch):
    """Title -> the axes of each panel that is made; the panel itself becomes its title."""
    found = {}

    def remember(title, caption, draw, **size):
        figure = Figure()
        draw(figure.subplots())
        found[title] = figure.axes
        return title

    for module in (outcome, trajectories):
        monkeypatch.setattr(module, "make_panel", remember)
    return found
