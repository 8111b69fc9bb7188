"""A comparison of models as a picture: change and sign conflict of every layer and kind of tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_merge.compare.diff import ModelDifference
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.task_vectors import Measures
from rlhf_merge.report_text import clipped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure, SubFigure

_ANNOTATED = 300
"""So many cells have their number written in them."""
_LOGARITHMIC = 30
"""Where the largest change is more than so many times the smallest, the scale is logarithmic."""
_PANELS_ABREAST = 3
_BAR_WIDTH, _TITLE_HEIGHT, _PADDING = 1.1, 0.55, 0.08
"""Inches."""
_DPI = 130
_EMPTY = "#e9e9e9"


def heatmap(difference: ModelDifference, path: str | Path) -> None:
    """Draw a comparison: for each model the change, and for several their sign conflict, by layer and kind.

    Embedding, last norm and head have a row each, in which one cell goes through all kinds.
    """
    check_heatmap(path)
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    grid = _Grid.of(difference)
    count = len(difference.models)
    down, abreast = math.ceil(count / _PANELS_ABREAST), min(count, _PANELS_ABREAST)
    widths = [abreast * grid.width + _BAR_WIDTH, *([grid.width + _BAR_WIDTH] if count > 1 else [])]
    size = (sum(widths), down * grid.height + _TITLE_HEIGHT)
    layout = ConstrainedLayoutEngine(h_pad=_PADDING, w_pad=_PADDING)
    figure = Figure(figsize=size, dpi=_DPI, layout=layout)
    parts = figure.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0]
    _draw_changes(parts[0], difference, grid, (down, abreast))
    if count > 1:
        _draw_conflict(parts[1], difference, grid, down)
    figure.suptitle(_title(difference, sum(widths)), fontsize=11, fontweight="bold", parse_math=False)
    _save(figure, Path(path))


def check_heatmap(path: str | Path) -> None:
    """Refuse what `heatmap` would refuse, before models are read for nothing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MergeError(
            "a heat map needs matplotlib, which is not installed; install rlhf-merge[plot]"
        ) from error
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise MergeError(f"{path} {found}, so no heat map can be written there; give the path of a file")


@dataclass(frozen=True)
class _Grid:
    """The cells of a panel.

    Args:
        rows: layers, and what is before and behind them.
        kinds: the columns.
        first: the first row that is a layer.
        last: end of the layers' rows.
    """

    rows: tuple[str, ...]
    kinds: tuple[str, ...]
    first: int
    last: int

    @classmethod
    def of(cls, difference: ModelDifference) -> _Grid:
        rows = tuple(difference.by_row)
        first = rows.index(difference.layers[0]) if difference.layers else len(rows)
        return cls(rows, tuple(difference.kinds) or ("",), first, first + len(difference.layers))

    @property
    def annotated(self) -> bool:
        """Whether the cells have their numbers written in them."""
        return len(self.rows) * len(self.kinds) <= _ANNOTATED

    @property
    def width(self) -> float:
        """Inches of a panel with the labels of its rows."""
        label = 0.09 * max(map(len, self.rows), default=0)
        return label + max(1.6, len(self.kinds) * (0.5 if self.annotated else 0.34))

    @property
    def height(self) -> float:
        """Inches of a panel with the labels of its columns."""
        row = 0.27 if self.annotated else 0.17
        return 0.9 + 0.075 * max(map(len, self.kinds)) + max(1.0, min(28.0, len(self.rows) * row))

    def values(
        self, difference: ModelDifference, value: Callable[[Measures], float | None]
    ) -> NDArray[np.float64]:
        """A value of every cell, (rows, kinds); NaN where there is no such tensor."""
        found = np.full((len(self.rows), len(self.kinds)), np.nan)
        for index, row in enumerate(self.rows):
            for column, kind in enumerate(self.kinds):
                inside = self.first <= index < self.last
                measures = difference.cells.get((row, kind if inside else row))
                number = value(measures) if measures is not None else None
                found[index, column] = np.nan if number is None else number
        return found


def _draw_changes(part: SubFigure, difference: ModelDifference, grid: _Grid, shape: tuple[int, int]) -> None:
    """A panel for each model, with one scale of colours."""
    panels = list(part.subplots(*shape, squeeze=False).flat)
    models = range(len(difference.models))
    values = [grid.values(difference, lambda of, model=model: of.relative_norm(model)) for model in models]
    scale = _scale(np.stack(values))
    images = [
        _draw(panel, grid, found, scale, "viridis") for panel, found in zip(panels, values, strict=False)
    ]
    if len(models) > 1:
        for panel, name in zip(panels, difference.names, strict=False):
            panel.set_title(clipped(name, int(grid.width * 9)), fontsize=9, parse_math=False)
    for panel in panels[len(models) :]:
        panel.set_visible(False)
    _add_bar(part, images[0], panels, grid, "norm of the change, % of the base's")


def _draw_conflict(part: SubFigure, difference: ModelDifference, grid: _Grid, down: int) -> None:
    """One panel for all models, as large as those of the changes."""
    from matplotlib.colors import Normalize

    panel, *others = part.subplots(down, 1, squeeze=False)[:, 0]
    for other in others:
        other.set_visible(False)
    values = grid.values(difference, lambda of: of.any_conflict)
    image = _draw(panel, grid, values, Normalize(0, float(np.nanmax(values, initial=0)) or 1), "plasma")
    density = f" (density {difference.density})" if difference.density is not None else ""
    panel.set_title(f"opposed signs{density}", fontsize=9)
    _add_bar(part, image, [panel], grid, "elements with opposed signs, %")


def _scale(values: NDArray[np.float64]) -> Normalize:
    """From 0 or, where the values are far apart, logarithmic from the least that is not 0."""
    from matplotlib.colors import LogNorm, Normalize

    drawn = values[np.isfinite(values) & (values > 0)]
    if not len(drawn):
        return Normalize(0, 1)
    low, high = float(drawn.min()), float(drawn.max())
    return LogNorm(low, high) if high > _LOGARITHMIC * low else Normalize(0, high)


def _draw(
    panel: Axes, grid: _Grid, values: NDArray[np.float64], scale: Normalize, colours: str
) -> ScalarMappable:
    """One panel."""
    image = panel.imshow(np.ma.masked_invalid(values), norm=scale, cmap=colours, aspect="auto")
    panel.set_facecolor(_EMPTY)
    panel.spines[:].set_visible(False)
    small = 8 if grid.annotated else 7
    every = math.ceil(len(grid.rows) / 160)
    panel.set_yticks(range(0, len(grid.rows), every), grid.rows[::every], fontsize=small)
    panel.set_xticks(range(len(grid.kinds)), grid.kinds, fontsize=small, rotation=90)
    panel.tick_params(length=0)
    _rule(panel, grid)
    if grid.annotated:
        _annotate(panel, grid, values, image)
    return image


def _rule(panel: Axes, grid: _Grid) -> None:
    """White lines between the cells, thicker ones where the layers begin and end."""
    rows, columns = np.arange(1, len(grid.rows)), np.arange(1, len(grid.kinds))
    widths = np.where((rows > grid.first) & (rows < grid.last), 0.5, 2.0)
    panel.hlines(rows - 0.5, -0.5, len(grid.kinds) - 0.5, color="white", linewidths=widths.tolist())
    panel.vlines(columns - 0.5, grid.first - 0.5, grid.last - 0.5, color="white", linewidths=0.5)


def _annotate(panel: Axes, grid: _Grid, values: NDArray[np.float64], image: ScalarMappable) -> None:
    """Write the numbers into the cells, in black or in white."""
    colours = image.to_rgba(np.ma.masked_invalid(values))
    for index in range(len(grid.rows)):
        inside = grid.first <= index < grid.last
        for column in range(len(grid.kinds)) if inside else [0]:
            value = float(values[index, column])
            if not math.isnan(value):
                panel.text(
                    column if inside else (len(grid.kinds) - 1) / 2,
                    index,
                    _number(value),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="black" if _is_light(colours[index, column]) else "white",
                )


def _is_light(colour: NDArray[np.float64]) -> bool:
    """Whether black stands out more than white, by the luminance of WCAG 2.1; no colour is light."""
    red, green, blue, alpha = (float(part) for part in colour)
    return alpha == 0 or 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.18


def _number(value: float) -> str:
    """A share in percent, without the sign."""
    if math.isinf(value):
        return "∞"
    percent = 100 * value
    if 0 < percent < 0.001:
        return "<.001"
    digits = sum(percent < limit for limit in (99.95, 9.995, 0.0995)) if percent else 0
    return f"{percent:.{digits}f}"


def _add_bar(part: SubFigure, image: ScalarMappable, panels: list[Axes], grid: _Grid, label: str) -> None:
    """What the colours mean."""
    from matplotlib.ticker import FuncFormatter

    bar = part.colorbar(image, ax=panels, shrink=min(1.0, 4.0 / grid.height), aspect=22, pad=0.02)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8, which="both")
    bar.formatter = FuncFormatter(lambda value, _: f"{100 * value:.3g}")
    bar.outline.set_visible(False)
    bar.update_ticks()


def _title(difference: ModelDifference, width: float) -> str:
    """Which models, as far as there is room."""
    base = clipped(difference.labels[0], 30)
    names = ", ".join(clipped(name, 24) for name in difference.names)
    if len(names) + len(base) > width * 9:
        names = f"{len(difference.names)} models" if len(difference.names) > 1 else clipped(names, 16)
    return f"What {names} changed in {base}"


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    except OSError as error:
        raise MergeError(
            f"{path} cannot be written ({error.strerror or error}); give another file"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
