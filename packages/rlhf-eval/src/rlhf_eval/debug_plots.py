"""Figures for finding out why a training does not learn: gradients and activations by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_eval.figures import BLUE, ORANGE, Rows, new_figure, save_png, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_IGNORED = {"weight", "default", "base_layer", "modules_to_save"}
_BEFORE, _AFTER = "in", "out"
_DEAD = "#FBE3D6"
_COLUMNS = 60
"""Most recorded steps drawn side by side."""


def gradient_flow_figure(rows: Rows, path: str | Path) -> None:
    """Draw gradient norms by kind of parameter and layer, and by layer over the steps, as one PNG.

    Cells without a parameter stay empty; a norm of zero or one that is not finite is written into its cell.

    Args:
        rows: One dict per recorded step, at least one: `step`, and `norms`, parameter name -> 2-norm of its
            gradient (null where it is not finite), in the order of the model.
        path: The PNG file, replaced where it exists.

    Raises:
        ValueError: there are no rows, or the last one has no norms.
    """
    if not rows or not rows[-1]["norms"]:
        raise ValueError("there are no gradient norms to draw")
    last = rows[-1]
    cells, kinds, layers = _cells(last["norms"])
    shown = [rows[i] for i in _spread(len(rows))]
    by_step = {
        (layer, row["step"]): norm for row in shown for layer, norm in _layer_norms(row["norms"]).items()
    }
    steps = [row["step"] for row in shown]
    values = [norm for norm in [*cells.values(), *by_step.values()] if norm and math.isfinite(norm)]
    limits = (min(values), max(values)) if values else (0.1, 1.0)
    with styled():
        width, height = (
            min(24.0, max(6.0, 1.5 + 0.42 * len(layers))),
            2.2 + 0.3 * max(len(kinds), len(layers)),
        )
        figure = new_figure(width + 7, max(4.6, height))
        left, right = figure.subplots(1, 2, width_ratios=[width, 6])
        image = _heat(left, cells, kinds, layers, limits)
        left.set_title(f"Gradient norm of each parameter, step {last['step']}")
        left.set_xlabel("layer")
        _heat(right, by_step, layers, steps, limits)
        right.set_title("Gradient norm of each layer over the steps")
        right.set_xlabel("step")
        right.set_ylabel("layer")
        figure.colorbar(image, ax=[left, right], label="2-norm of the gradient", pad=0.01)
        save_png(figure, path)


def activation_figure(rows: Rows, path: str | Path) -> None:
    """Draw the distribution of every layer's output, and its spread over the layers, as one PNG.

    Args:
        rows: One dict per recorded step, at least one: `step`; `edges`, the edges of the bins of magnitudes,
            ascending; `layers`, one dict each: `counts` per bin, `std`, `absmax`, `nonfinite` (how many).
        path: The PNG file, replaced where it exists.

    Raises:
        ValueError: there are no rows, or the last one has no layers.
    """
    if not rows or not rows[-1]["layers"]:
        raise ValueError("there are no activations to draw")
    last = rows[-1]
    with styled():
        figure = new_figure(14, max(4.6, 2 + 0.22 * len(last["layers"])))
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
        _distribution(figure, left, last)
        _spread_by_layer(right, [rows[0], last] if len(rows) > 1 else [last])
        figure.legend(loc="outside lower right", ncols=2)
        save_png(figure, path)


def _distribution(figure: Figure, axes: Axes, row: Mapping[str, Any]) -> None:
    from matplotlib.colors import LogNorm

    counts = np.array([layer["counts"] for layer in row["layers"]], dtype=float)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    at = np.flatnonzero(share.any(0))
    first, stop = (at[0], at[-1] + 1) if len(at) else (0, share.shape[1])
    smallest = share[share > 0].min() if len(at) else 0.1
    image = axes.pcolormesh(
        row["edges"][first : stop + 1],
        np.arange(len(counts) + 1) - 0.5,
        np.ma.masked_equal(share[:, first:stop], 0),
        norm=LogNorm(smallest, max(share.max(), smallest * 10)),
        cmap="viridis",
    )
    for i, layer in enumerate(row["layers"]):
        if layer["nonfinite"]:
            text, place = f"{layer['nonfinite']} NaN or infinite", axes.get_yaxis_transform()
            axes.text(0.99, i, text, transform=place, ha="right", va="center", fontsize=9, color=ORANGE)
    _layer_axis(axes, len(counts))
    axes.set_xscale("log")
    axes.grid(False)
    axes.set_title(f"Outputs of each layer, step {row['step']}")
    axes.set_xlabel("magnitude of a value")
    figure.colorbar(image, ax=axes, label="share of the values", pad=0.01)


def _spread_by_layer(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    drawn: list[float] = []
    for key, label, color in (("absmax", "largest magnitude", ORANGE), ("std", "standard deviation", BLUE)):
        for row, style in zip(rows, ("-",) if len(rows) == 1 else (":", "-"), strict=True):
            values = [layer[key] or math.nan for layer in row["layers"]]
            drawn += [value for value in values if value > 0]
            axes.plot(
                values,
                range(len(values)),
                color=color,
                linestyle=style,
                marker="o",
                markersize=4,
                label=f"{label}, step {row['step']}",
            )
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    if drawn:  # whole decades, so that at least two ticks are labelled
        low, high = math.floor(math.log10(min(drawn))), math.ceil(math.log10(max(drawn)))
        axes.set_xlim(10.0**low / 1.5, 10.0 ** max(high, low + 1) * 1.5)
    _layer_axis(axes, len(rows[-1]["layers"]))
    axes.set_title("Spread over the layers")
    axes.set_xlabel("value")


def _layer_axis(axes: Axes, layers: int) -> None:
    axes.set_yticks(range(0, layers, math.ceil(layers / 40)))
    axes.set_ylim(layers - 0.5, -0.5)
    axes.set_ylabel("layer")


def _heat(
    axes: Axes,
    cells: Mapping[tuple[Any, Any], float | None],
    rows: Sequence[Any],
    columns: Sequence[Any],
    limits: tuple[float, float],
) -> Any:
    """A grid of coloured cells; what cannot be coloured is written."""
    from matplotlib.colors import LogNorm

    low, high = limits
    grid = np.full((len(rows), len(columns)), np.nan)
    for (row, column), norm in cells.items():
        at = rows.index(row), columns.index(column)
        if norm and math.isfinite(norm):
            grid[at] = norm
        else:
            axes.add_patch(_patch(at))
            text = "0" if norm == 0 else "NaN"
            axes.text(at[1], at[0], text, ha="center", va="center", fontsize=8, color=ORANGE)
    image = axes.imshow(
        np.ma.masked_invalid(grid), norm=LogNorm(low, max(high, low * 10)), cmap="viridis", aspect="auto"
    )
    axes.grid(False)
    axes.set_yticks(range(len(rows)), [str(row) for row in rows], fontsize=10)
    every = math.ceil(len(columns) / 16)
    axes.set_xticks(range(0, len(columns), every), [str(column) for column in columns[::every]], fontsize=10)
    return image


def _patch(at: tuple[int, int]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((at[1] - 0.5, at[0] - 0.5), 1, 1, color=_DEAD)


def _cells(
    norms: Mapping[str, float | None],
) -> tuple[dict[tuple[str, str], float | None], list[str], list[str]]:
    """Norm of each (kind, layer), the kinds, and the layers in order with what is before and after them."""
    cells: dict[tuple[str, str], float | None] = {}
    grouped: dict[tuple[str, str], list[float | None]] = {}
    for kind, layer, norm in _placed(norms):
        grouped.setdefault((kind, layer), []).append(norm)
    for place, parts in grouped.items():
        cells[place] = _joined(parts)
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    layers = list(dict.fromkeys(layer for _, layer in cells))
    numbers = sorted((layer for layer in layers if layer.isdecimal()), key=int)
    return cells, kinds, [*[_BEFORE] * (_BEFORE in layers), *numbers, *[_AFTER] * (_AFTER in layers)]


def _layer_norms(norms: Mapping[str, float | None]) -> dict[str, float | None]:
    grouped: dict[str, list[float | None]] = {}
    for _, layer, norm in _placed(norms):
        grouped.setdefault(layer, []).append(norm)
    return {layer: _joined(parts) for layer, parts in grouped.items()}


def _joined(parts: Iterable[float | None]) -> float | None:
    """2-norm of several gradients together, None if one of them is not finite."""
    squares = [None if norm is None else norm * norm for norm in parts]
    return None if None in squares else math.sqrt(sum(square for square in squares if square is not None))


def _placed(norms: Mapping[str, float | None]) -> Iterable[tuple[str, str, float | None]]:
    """Kind, layer and norm of each parameter; the layer is the first number in its name."""
    seen = False
    for name, norm in norms.items():
        match = _LAYER.search(name)
        seen = seen or match is not None
        layer = match[1] if match else (_AFTER if seen else _BEFORE)
        parts = [part for part in name[match.end() if match else 0 :].split(".") if part not in _IGNORED]
        yield ".".join(parts if match else parts[-1:]) or name, layer, norm


def _spread(count: int) -> list[int]:
    """Indices of at most `_COLUMNS` of `count` items, evenly, the last one among them."""
    if count <= _COLUMNS:
        return list(range(count))
    return [round(i) for i in np.linspace(0, count - 1, _COLUMNS)]
