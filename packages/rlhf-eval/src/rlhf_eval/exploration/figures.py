"""Figures of preference pairs: lengths, depth, length against the label, phrases, predictors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_eval.exploration.subsets import draw_subsets
from rlhf_eval.figures import BLUE, GREY, ORANGE, Panel, make_panel, new_figure, save_png, styled

Figure = tuple[str, str, Callable[[Any, Mapping[str, Any]], None], float]
"""Title, caption, drawing and height in inches."""
_PHRASES = 12
_LAST_DRAWN = "\u0530"
"""Figures show Latin, Greek and Cyrillic letters; matplotlib's font has few others."""


def panels(results: Mapping[str, Any]) -> dict[str, Panel]:
    """The figures of the page, by the names of their files."""
    return {
        name: make_panel(title, caption, lambda axes, draw=draw: draw(axes, results), height=height)
        for name, (title, caption, draw, height) in _figures(results).items()
    }


def draw_figures(results: Mapping[str, Any], folder: Path) -> None:
    """Write each figure as a PNG into a folder."""
    for name, (title, _, draw, height) in _figures(results).items():
        with styled():
            figure = new_figure(7, height * 1.3)
            axes = figure.add_subplot(1, 1, 1)
            draw(axes, results)
            figure.suptitle(title)  # above a legend that stands above the axes
            save_png(figure, folder / f"{name}.png")


def _figures(results: Mapping[str, Any]) -> dict[str, Figure]:
    """`FIGURES`, and one for each column that the pairs are looked at by."""
    found: dict[str, Figure] = dict(FIGURES)
    for number, column in enumerate(results.get("by", ())):
        found[subset_figure(number)] = (
            f"By {column['column']}",
            "Each value's own pairs, with 95% intervals; one half is chance. A floor needs 200 pairs.",
            lambda axes, results, column=column: draw_subsets(axes, column["values"]),
            1.8 + 0.34 * len(column["values"]),
        )
    return found


def subset_figure(number: int) -> str:
    """The name of the figure of a column that the pairs are looked at by."""
    return f"by_{number + 1}"


def _draw_lengths(axes: Any, results: Mapping[str, Any]) -> None:
    unit = _unit(results)
    for part, color in (("chosen", BLUE), ("rejected", ORANGE)):
        bars = results["lengths"][unit][part]["histogram"]
        axes.stairs(bars["counts"], bars["edges"], color=color, label=part, linewidth=2)
    axes.set_xlabel(f"{unit}; the last step has all longer ones")
    axes.set_ylabel("completions")
    axes.legend()


def _draw_difference(axes: Any, results: Mapping[str, Any]) -> None:
    bars = results["length_difference"]
    edges, counts = bars["edges"], bars["counts"]
    widths = [high - low for low, high in pairwise(edges)]
    colors = [ORANGE if high < 0 else BLUE if low > 0 else GREY for low, high in pairwise(edges)]
    axes.bar(edges[:-1], counts, width=widths, align="edge", color=colors)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_xlabel(f"{_unit(results)} of chosen − rejected")
    axes.set_ylabel("pairs")


def _draw_depth(axes: Any, results: Mapping[str, Any]) -> None:
    turns = {int(turn): count for turn, count in results["turns"].items()}
    most = max(turns)
    axes.bar(list(turns), list(turns.values()), color=BLUE)
    axes.set_xticks(range(1, most + 1, max(1, most // 9)))
    axes.set_xlabel("turns of the user")
    axes.set_ylabel("pairs")


def _draw_preference(axes: Any, results: Mapping[str, Any]) -> None:
    bins = results["length_bins"]
    x, y = [each["ratio"] for each in bins], [each["estimate"] for each in bins]
    below, above = zip(*map(_ends, bins), strict=True) if bins else ((), ())
    errors = [np.subtract(y, below), np.subtract(above, y)]
    axes.axhline(0.5, color=GREY, linewidth=1)
    axes.errorbar(x, y, yerr=np.maximum(errors, 0), fmt="o-", color=BLUE, markersize=5, linewidth=1.5)
    axes.set_xscale("log", base=2)
    ticks = [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16]
    shown = [tick for tick in ticks if not x or min(x) / 2 <= tick <= max(x) * 2]
    axes.set_xticks(shown, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel("times as long as the other completion")
    axes.set_ylabel("share preferred")


def _draw_phrases(axes: Any, results: Mapping[str, Any]) -> None:
    found = results["phrases"]["anywhere"]["phrases"]
    drawn = [each for each in found if max(each["text"]) < _LAST_DRAWN][:_PHRASES]
    shown = sorted(drawn, key=lambda each: each["z"])
    if not shown:
        text = "none beyond chance"
        if found or results["phrases"]["opening"]["phrases"]:
            text = (
                "the font lacks their script: see the table" if found else "first words only: see the table"
            )
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
        return
    colors = [BLUE if each["z"] > 0 else ORANGE for each in shown]
    axes.barh(range(len(shown)), [each["z"] for each in shown], color=colors)
    axes.set_yticks(range(len(shown)), [_short(each["text"]) for each in shown])
    axes.set_ylim(min(len(shown) - 6, 0) - 0.6, len(shown) - 0.4)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("z of the log-odds; right: more in chosen")


def _draw_predictors(axes: Any, results: Mapping[str, Any]) -> None:
    found = [each for each in results["shortcuts"]["predictors"][::-1] if each["decided"]]
    for at, each in enumerate(found):
        axes.plot(_ends(each["accuracy"]), [at, at], color=BLUE, linewidth=3, solid_capstyle="round")
        axes.plot(each["accuracy"]["estimate"], at, "o", color=BLUE, markersize=6)
    axes.axvline(0.5, color=GREY, linewidth=1)
    axes.set_yticks(range(len(found)), [each["name"] for each in found])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("share of held-out pairs predicted")


def _ends(share: Mapping[str, Any]) -> tuple[float, float]:
    """Both ends of an interval; the estimate if there is none."""
    low, high = share["low"], share["high"]
    return (share["estimate"],) * 2 if low is None or high is None else (low, high)


def _unit(results: Mapping[str, Any]) -> str:
    return results["length_unit"]


def _short(text: str) -> str:
    """A phrase as far as it can be drawn: matplotlib reads $ as mathematics."""
    return (text if len(text) <= 28 else f"{text[:27]}…").replace("$", r"\$")


FIGURES: dict[str, Figure] = {
    "length_distribution": (
        "How long are completions?",
        "Completions by length; the longest hundredth is in the last bar.",
        _draw_lengths,
        3.7,
    ),
    "length_difference": (
        "Which one is longer?",
        "Pairs by how much longer the chosen completion is; the ends hold what is beyond them.",
        _draw_difference,
        3.7,
    ),
    "conversation_depth": (
        "How deep are dialogues?",
        "Pairs by the turns of the user; any other prompt is one turn.",
        _draw_depth,
        3.7,
    ),
    "length_vs_preference": (
        "Is longer preferred?",
        "Share preferred by how many times as long a completion is as the other, with 95% intervals; at one "
        "half length says nothing.",
        _draw_preference,
        3.7,
    ),
    "phrases": (
        "Which phrases go with the label?",
        "Phrases with the largest |z|, corrected for how many were looked at.",
        _draw_phrases,
        4.4,
    ),
    "shortcuts": (
        "What predicts the label without reading?",
        "Accuracy on prompts that a predictor was not fitted on, with 95% intervals; one half is chance.",
        _draw_predictors,
        4.4,
    ),
}
"""The figures of all data."""
