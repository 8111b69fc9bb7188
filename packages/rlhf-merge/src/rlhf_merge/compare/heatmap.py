"""A comparison of models as a picture: change and sign conflict of every layer and kind of tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_merge.compare.diff import ModelDifference
from rlhf_merge.compare.measures import Measures
from rlhf_merge.errors import MergeError
from rlhf_merge.text import clipped, share_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

_ANNOTATED = 300
"""Up to this many cells have their number written in them."""
_LOGARITHMIC = 30
"""The scale is logarithmic where the largest change is more than this many times the smallest."""
_PANELS_ABREAST = 4


def heatmap(difference: ModelDifference, path: str | Path) -> None:
    """Draw a comparison: for each model the change, and for several their sign conflict, by layer and kind.

    Embedding, last norm and head have a row each, in which one cell goes through all kinds.
    """
    check_heatmap(path)
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    rows, kinds, count = list(difference.by_row), difference.kinds or [""], len(difference.models)
    changes = [_cells(difference, lambda of, model=model: of.relative_norm(model)) for model in range(count)]
    width, height = 0.34, 0.17
    if len(rows) * len(kinds) <= _ANNOTATED:
        width, height = 0.5, 0.27
    width = 1.2 + 0.09 * max(map(len, rows), default=0) + max(1.6, len(kinds) * width)
    height = 0.9 + 0.075 * max(map(len, kinds)) + max(1.0, min(28.0, len(rows) * height))
    total = count + (count > 1)
    down, abreast = math.ceil(total / _PANELS_ABREAST), min(total, _PANELS_ABREAST)
    figure = Figure(figsize=(abreast * width, down * height + 0.6), dpi=130, layout="constrained")
    panels = list(figure.subplots(down, abreast, squeeze=False).flat)

    def draw(
        on: list[Axes], values: list[NDArray[np.float64]], scale: Normalize, colours: str, label: str
    ) -> None:
        """Panels of one scale, and what their colours mean."""
        images = [_draw(*pair, difference, scale, colours) for pair in zip(on, values, strict=True)]
        bar = figure.colorbar(images[0], ax=on, format=FuncFormatter(lambda value, _: share_text(value)))
        bar.set_label(label, fontsize=8)
        bar.ax.tick_params(labelsize=8, which="both")

    drawn = np.stack(changes)
    drawn = drawn[np.isfinite(drawn) & (drawn > 0)]
    low, high = (float(drawn.min()), float(drawn.max())) if len(drawn) else (1.0, 1.0)
    scale = LogNorm(low, high) if high > _LOGARITHMIC * low else Normalize(0, high)
    draw(panels[:count], changes, scale, "viridis", "norm of the change, relative to the base's")
    if count > 1:
        for panel, name in zip(panels, difference.names, strict=False):
            panel.set_title(clipped(name, int(width * 9)), fontsize=9, parse_math=False)
        values = _cells(difference, lambda of: of.of_any()["sign_conflict"])
        opposed = Normalize(0, float(np.nanmax(values, initial=0)) or 1)
        draw(panels[count:total], [values], opposed, "plasma", "elements with opposed signs")
        density = f" (density {difference.density})" if difference.density is not None else ""
        panels[count].set_title(f"opposed signs{density}", fontsize=9)
    for panel in panels[total:]:
        panel.set_visible(False)
    title = f"What {', '.join(difference.names)} changed in {difference.labels[0]}"
    figure.suptitle(clipped(title, int(abreast * width * 9)), fontsize=11, parse_math=False)
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or error
        raise MergeError(
            f"{path} cannot be written ({reason}); give another file", code="unwritable"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_heatmap(path: str | Path) -> None:
    """Refuse what `heatmap` would refuse, before models are read for nothing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MergeError(
            "a heat map needs matplotlib, which is not installed; install rlhf-merge[plot]",
            code="missing_package",
        ) from error
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise MergeError(
            f"{path} {found}, so no heat map can be written there; give the path of a file",
            code="invalid_output",
        )


def _cells(difference: ModelDifference, value: Callable[[Measures], float | None]) -> NDArray[np.float64]:
    """A value of every cell, (rows, kinds); NaN where there is no such tensor."""
    found = np.full((len(difference.by_row), len(difference.kinds) or 1), np.nan)
    for index, row in enumerate(difference.by_row):
        for column in range(found.shape[1]):
            kind = difference.kinds[column] if (row, row) not in difference.cells else row
            measures = difference.cells.get((row, kind))
            number = value(measures) if measures is not None else None
            found[index, column] = np.nan if number is None else number
    return found


def _draw(
    panel: Axes, values: NDArray[np.float64], difference: ModelDifference, scale: Normalize, colours: str
) -> ScalarMappable:
    """One panel: the cells and, where they are few, their numbers in percent."""
    image = panel.imshow(np.ma.masked_invalid(values), norm=scale, cmap=colours, aspect="auto")
    panel.set_facecolor("#e9e9e9")
    rows = list(difference.by_row)
    every = math.ceil(len(rows) / 160)
    panel.set_yticks(range(0, len(rows), every), rows[::every], fontsize=7)
    panel.set_xticks(range(len(difference.kinds)), difference.kinds, fontsize=7, rotation=90)
    for index, row in enumerate(rows) if values.size <= _ANNOTATED else ():
        inside = (row, row) not in difference.cells
        for column in range(values.shape[1]) if inside else [0]:
            value = float(values[index, column])
            if math.isnan(value):
                continue
            place = column if inside else (values.shape[1] - 1) / 2
            dark = math.isfinite(value) and scale(value) < 0.6
            text = share_text(value).removesuffix("%")
            panel.text(place, index, text, ha="center", va="center", fontsize=7, color="w" if dark else "k")
    return image
