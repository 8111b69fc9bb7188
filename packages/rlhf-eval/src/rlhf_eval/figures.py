"""Helpers of all figures: colours, style, lines from metric rows, legends, files, panels of a page.

matplotlib is imported when the first figure is drawn. Figures are drawn by its Agg and SVG backends
directly, so no display is needed and no global pyplot state is touched.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_data import UserError, explain_full_disk
from rlhf_eval.html import svg_figure, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "ORANGE",
    "PAPER",
    "PURPLE",
    "Panel",
    "Rows",
    "add_colorbar",
    "add_legend",
    "can_draw",
    "columns_of",
    "draw_line",
    "figure_grid",
    "finite",
    "make_panel",
    "new_figure",
    "of_phase",
    "pairs",
    "save_png",
    "step_axis",
    "styled",
    "value_of",
]

Rows = Sequence[dict[str, Any]]
"""Rows of a log: each has the step and the metrics of one report."""

BLUE = "#0072B2"
"""Of Okabe & Ito's palette, as the next ones: distinguishable with every common form of colour blindness."""
ORANGE = "#D55E00"
"""Stands out from `BLUE` most."""
GREEN = "#007E5C"
"""Third colour of a figure."""
PURPLE = "#A3507F"
"""Fourth colour of a figure."""
GREY = "#666666"
"""For what is there to compare with."""
PAPER = "#FFFFFF"
"""The background of a figure."""
_INK, _GRID = "#1C2430", "#E4E4E4"
_ON_DARK = {
    BLUE: "#56B4E9",
    ORANGE: "#F08A3C",
    GREEN: "#3CC69B",
    PURPLE: "#DA8FBA",
    GREY: "#A3ABB8",
    PAPER: "#12161D",
    _INK: "#E6E9EE",
    _GRID: "#303743",
}
"""Colours of a panel in dark mode."""
_COLOR_STEPS = 32
_DPI = 120
_STYLE: dict[Any, Any] = {
    "font.size": 12,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "lines.linewidth": 2.0,
    "svg.hashsalt": "rlhf",
}


def can_draw() -> bool:
    """Whether matplotlib is installed, which the extra `plots` brings."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Panel:
    """One figure of a page: title and caption are text, `svg` is a document."""

    title: str
    caption: str
    svg: str


def make_panel(
    title: str,
    caption: str,
    draw: Callable[[Axes], None],
    *,
    width: float = 5.2,
    height: float = 3.7,
) -> Panel:
    """Draw one figure for pages that arrange figures by screen width.

    Text is drawn as outlines, so that it looks the same everywhere, the background is left out, and the
    module's colours are lighter ones where the reader prefers dark pages.

    Args:
        title: Title of the panel; the figure itself has none.
        caption: What it shows, in a sentence or two.
        draw: Draws on the axes it is given.
        width: In inches.
        height: In inches.
    """
    with styled():
        figure = new_figure(width, height)
        draw(figure.add_subplot(1, 1, 1))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return Panel(title, caption, _for_light_and_dark(buffer.getvalue().decode("utf-8")))


def figure_grid(panels: Sequence[Panel], *, titled: bool = True, small: bool = False) -> str:
    """HTML of panels beside one another, as many as fit, with their titles over them; empty without any."""
    cells = "".join(
        f"<div>{f'<h3>{text(each.title)}</h3>' * titled}{svg_figure(each.svg, each.caption)}</div>"
        for each in panels
    )
    return f'<div class="grid{" small" * small}">{cells}</div>\n' if panels else ""


def _for_light_and_dark(svg: str) -> str:
    names = {light.lower(): f"--c{index}" for index, light in enumerate(_ON_DARK)}
    for light, name in names.items():
        svg = svg.replace(light, f"var({name})")
    light, dark = (
        "".join(f"{name}:{color};" for name, color in zip(names.values(), colors, strict=True))
        for colors in (_ON_DARK.keys(), _ON_DARK.values())
    )
    rules = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return svg.replace("<defs>", f"<defs><style>{rules}</style>", 1)


def draw_line(axes: Axes, rows: Rows, key: str, **style: Any) -> None:
    """Draw a metric over the steps, a dot if there is one value only; nothing if no row has it."""
    points = pairs(rows, "step", key)
    if points:
        if len(points) == 1:
            style.setdefault("marker", ".")
        axes.plot(*columns_of(points), **style)


def step_axis(axes: Axes) -> None:
    """Label the axis of the steps, which are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def add_legend(axes: Axes, *, columns: int, handles: list[Any] | None = None) -> None:
    """Put the legend below the axis label, in `columns` columns."""
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


def finite(value: Any) -> float | None:
    """A number; None for anything that is none or is not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def add_colorbar(axes: Axes, drawn: Any, label: str) -> None:
    """Explain the colours of what was drawn, in whole steps so that no raster image is needed."""
    drawn.set_cmap(drawn.get_cmap().resampled(_COLOR_STEPS))
    figure = axes.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(drawn, ax=axes, label=label)
    assert bar.solids is not None
    bar.solids.set_edgecolor("face")


def value_of(row: dict[str, Any], key: str) -> float | None:
    """A metric of a row; None if it is missing, null or not finite."""
    return finite(row.get(key))


def of_phase(metrics: Rows, phase: str) -> Rows:
    """The rows of `plain` or of `minmax`."""
    return [row for row in metrics if row.get("phase") == phase]


def pairs(rows: Rows, x_key: str, y_key: str) -> list[tuple[float, float]]:
    """Two metrics of the rows that have both."""
    both = [(value_of(row, x_key), value_of(row, y_key)) for row in rows]
    return [(x, y) for x, y in both if x is not None and y is not None]


def columns_of(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The first and the second entries."""
    return [x for x, _ in points], [y for _, y in points]


def styled() -> Any:
    """Context in which figures have this module's style.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "figures need matplotlib: pip install 'rlhf-eval[plots]'", code="missing_package"
        ) from error

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
            engine = figure.get_layout_engine()
            if engine is not None:  # `savefig` would draw everything once more only to lay it out
                figure.set_dpi(_DPI)
                engine.execute(figure)
                figure.set_layout_engine("none")
            figure.savefig(temporary, format="png", dpi=_DPI)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
