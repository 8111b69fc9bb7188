"""What every figure shares: colours, style, lines from metric rows, legends, files.

matplotlib is imported when the first figure is drawn. Figures are drawn by its Agg and SVG backends
directly, so no display is needed and no global pyplot state is touched.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_data.files import explain_full_disk

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]

# Okabe & Ito's palette, distinguishable with every common form of colour blindness.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#007E5C", "#A3507F", "#666666"
_STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "lines.linewidth": 2.0,
    "svg.hashsalt": "rlhf",
}


def draw_line(axes: Axes, rows: Rows, key: str, **style: Any) -> None:
    """Draw a metric over the steps; nothing where no row has it."""
    points = pairs(rows, "step", key)
    if points:
        axes.plot(*columns_of(points), **style)


def add_legend(axes: Axes, *, columns: int, handles: list[Any] | None = None) -> None:
    """Put the legend below the axis label, in so many columns."""
    from matplotlib.transforms import offset_copy

    handles = handles if handles is not None else axes.get_legend_handles_labels()[0]
    if handles:
        axes.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            bbox_transform=offset_copy(axes.transAxes, fig=axes.get_figure(root=True), y=-40, units="points"),
            ncols=columns,
            columnspacing=1.0,
            handlelength=1.5,
            borderaxespad=0.2,
        )


def value_of(row: dict[str, Any], key: str) -> float | None:
    """A metric of a row; None where it is missing, null or not finite."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def pairs(rows: Rows, x_key: str, y_key: str) -> list[tuple[float, float]]:
    """Two metrics of the rows that have both."""
    both = [(value_of(row, x_key), value_of(row, y_key)) for row in rows]
    return [(x, y) for x, y in both if x is not None and y is not None]


def columns_of(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The first and the second entries."""
    return [x for x, _ in points], [y for _, y in points]


def styled() -> Any:
    """Context in which figures have this module's style."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, size in inches, whose parts do not overlap."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))


def save_png(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, whole or not at all.

    Raises:
        UserError: the disk is full.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(temporary, format="png", dpi=120)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
