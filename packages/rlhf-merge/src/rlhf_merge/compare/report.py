"""A comparison of models as text, as JSON and as a picture of every layer and kind of tensor."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from rlhf_merge.compare.diff import Measures, ModelDifference
from rlhf_merge.errors import MergeError
from rlhf_merge.text import clipped, number_text, plain, share_text, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

_LEGEND = "change: norm of the difference, relative to the base's"
_LEGEND_OF_SIGNS = """signs opposed: share of the elements that models change with opposite signs
of shared: the same, of the elements that both change; 50% for unrelated changes"""
_ANNOTATED = 300
"""Up to this many cells have their number written in them."""
_LOGARITHMIC = 30
"""The scale is logarithmic where the largest change is more than this many times the smallest."""
_PANELS_ABREAST = 4


def difference_json(difference: ModelDifference) -> dict[str, Any]:
    """A comparison as plain values; what is not finite or does not exist is null."""
    names = difference.names

    def finite(facts: Mapping[str, float | None]) -> dict[str, Any]:
        return {name: plain(value) for name, value in facts.items()}

    def facts(of: Measures) -> dict[str, Any]:
        pairs = [
            {"models": [names[one], names[other]], **finite(of.of_pair(one, other))}
            for one, other in difference.pairs
        ]
        models = {name: finite(of.of_model(model)) for model, name in enumerate(names)}
        return {"elements": of.elements, "models": models, "pairs": pairs, **finite(of.of_any())}

    tensors = {}
    for tensor in difference.tensors:
        place = {"layer": tensor.place.row, "kind": tensor.place.kind, "shape": list(tensor.shape)}
        tensors[tensor.name] = place | facts(tensor.measures)
    unequal = {name: dict(zip(names, of, strict=True)) for name, of in difference.integers.items()}
    return {
        "base": difference.base,
        "models": list(difference.models),
        "names": list(names),
        "density": difference.density,
        "notes": list(difference.notes),
        "all": facts(difference.total),
        "layers": {row: facts(of) for row, of in difference.by_row.items()},
        "kinds": {kind: facts(of) for kind, of in difference.by_kind.items()},
        "tensors": tensors,
        "unequal_integers": unequal,
    }


def render_difference(difference: ModelDifference, *, by: str = "layer") -> RenderableType:
    """A comparison for a terminal: a table by layer, kind or tensor, and one of the models' pairs."""
    tensors = {tensor.name: tensor.measures for tensor in difference.tensors}
    tables = {"layer": difference.by_row, "kind": difference.by_kind, "tensor": tensors}
    if by not in tables:
        raise MergeError(f"by must be layer, kind or tensor, got {by!r}", code="invalid_value", key="by")
    columns, count = _columns(difference), len(difference.models)
    made = table(by, *columns, *(["most changed"] if by == "layer" else []))
    for column in made.columns[1 : len(columns) + 1] if count > 1 else ():
        column.max_width = 12 if count == 2 else 7  # of a long name, the beginning
    for row, measures in tables[by].items():
        last = [_most_changed_kind(difference, row)] if by == "layer" else []
        if last:  # its blank is not a place to cut it at
            made.columns[-1].min_width = max(len(last[0]), made.columns[-1].min_width or 0)
        made.add_row(Text(row), *(text(measures) for text in columns.values()), *last)
    made.add_section()
    made.add_row("all", *(text(difference.total) for text in columns.values()), style="bold")
    parts: list[RenderableType] = [made, Text(f"\n{_LEGEND}", "dim")]
    lines = [f"Note: {note}." for note in difference.notes]
    for name, counts in difference.integers.items():
        unequal = [pair for pair in zip(difference.names, counts, strict=True) if pair[1]]
        lines += [f"Integers differ: {name} of {model}, in {number} elements." for model, number in unequal]
    if count > 1:
        pairs = table("models", "cosine", "signs\nopposed", "of\nshared")
        for one, other in difference.pairs:
            cosine, *signs = difference.total.of_pair(one, other).values()
            named = Text(f"{difference.names[one]}, {difference.names[other]}")
            pairs.add_row(named, number_text(cosine, "z.3f"), *map(share_text, signs))
        parts = [made, "", pairs, Text(f"\n{_LEGEND}\n{_LEGEND_OF_SIGNS}", "dim")]
        for model, name in enumerate(difference.names):
            *_, changed, same = map(share_text, difference.total.of_model(model).values())
            lines.append(f"{name}: {changed} of the elements changed, {same} are the same in bfloat16.")
    return Group(*parts, *map(Text, lines))


def _columns(difference: ModelDifference) -> dict[str, Callable[[Measures], str]]:
    """The columns of numbers, by their headers."""
    count = len(difference.models)
    if count == 1:
        return {
            "change": lambda of: share_text(of.relative_norm(0)),
            "RMS": lambda of: number_text(of.of_model(0)["rms"]),
            "changed": lambda of: share_text(of.of_model(0)["changed"]),
            "same\nin bf16": lambda of: share_text(of.of_model(0)["same_in_bf16"]),
        }

    def lowest_cosine(of: Measures) -> str:
        cosines = [cosine for pair in difference.pairs if (cosine := of.of_pair(*pair)["cosine"]) is not None]
        return number_text(min(cosines, default=None), "z.3f")

    columns: dict[str, Callable[[Measures], str]] = {
        f"change\n{name}": lambda of, model=model: share_text(of.relative_norm(model))
        for model, name in enumerate(difference.names)
    }
    if count > 3:
        columns = {"most\nchange": lambda of: share_text(max(map(of.relative_norm, range(count))))}
    return columns | {
        "lowest\ncosine": lowest_cosine,
        "signs\nopposed": lambda of: share_text(of.of_any()["sign_conflict"]),
        "of\nshared": lambda of: share_text(of.of_any()["sign_conflict_of_shared"]),
    }


def _most_changed_kind(difference: ModelDifference, row: str) -> str:
    """The kind of a layer's tensors that changed most, and how much."""
    found = {
        kind: max(map(measures.relative_norm, range(len(difference.models))))
        for (place, kind), measures in difference.cells.items()
        if place == row and kind != row and measures.base_square
    }
    kind = max(found, key=lambda kind: found[kind], default="")
    return f"{kind} {share_text(found[kind])}" if found.get(kind) else ""


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
        message = f"{path} cannot be written ({error.strerror or error}); give another file"
        raise MergeError(message, code="unwritable") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_heatmap(path: str | Path) -> None:
    """Refuse what `heatmap` would refuse, before models are read for nothing."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        message = "a heat map needs matplotlib, which is not installed; install rlhf-merge[plot]"
        raise MergeError(message, code="missing_package") from error
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        message = f"{path} {found}, so no heat map can be written there; give the path of a file"
        raise MergeError(message, code="invalid_output")


def _cells(difference: ModelDifference, value: Callable[[Measures], float | None]) -> NDArray[np.float64]:
    """Matrix (rows, kinds) of a statistic; NaN for kinds that a row lacks."""
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
