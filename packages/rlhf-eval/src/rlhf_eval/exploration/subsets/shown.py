"""The table and the figure of a column's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_eval.figures import BLUE, GREY, ORANGE
from rlhf_eval.html import number, table, text

_LONGEST_NAME = 24
_NOTE = (
    "A value of fewer than 20 pairs, or beyond the 30 most frequent, is part of “other”. The floor is that "
    "of words and surface together, fitted on half of the value's own prompts and measured on the other "
    "half, from 200 pairs on. Flipped is what confident learning estimates, where the label is learned "
    "and the estimate fits the errors among the surest pairs. Same prompt: rows whose prompt is also in "
    "rows of other values. Intervals are 95%."
)


def subsets_section(column: Mapping[str, Any], figure: str = "") -> str:
    """The table of a column's values, with what it shows."""
    unit = column["values"][0]["length_unit"]
    rows = [_row(each) for each in column["values"]]
    head = ["", "pairs", "prompts", f"{unit}, chosen", f"{unit}, rejected", "longer chosen, %", "floor, %"]
    head += ["flipped, %", "duplicates", "contradictions", "ties", "empty", "leaks", "same prompt"]
    pooled = f" {column['pooled']:,} values are pooled as “other”." if column["pooled"] else ""
    beside = f'<div class="grid">{figure}<div><p>{text(_NOTE + pooled)}</p></div></div>'
    return beside + table(head, rows, numeric=True)


def _row(each: Mapping[str, Any]) -> list[str]:
    noise, counts = each["label_noise"], each["rows"]
    names = ("duplicates", "contradictions", "ties", "empty", "leaks", "prompts_of_other_values")
    return [
        f'<span dir="auto">{text(each["value"])}</span>',
        f"{each['pairs']:,}",
        f"{each['prompts']:,}",
        number(each["chosen_length"], 1),
        number(each["rejected_length"], 1),
        _share(each["longer_where_they_differ"]),
        _share(each["floor"]),
        _share(noise["flip_rate"] if noise and noise["claims_rate"] else None),
        *(f"{counts[name]:,}" for name in names),
    ]


def _share(share: Mapping[str, Any] | None) -> str:
    if share is None or share["estimate"] is None:
        return "–"
    if share["low"] is None:
        return number(100 * share["estimate"], 1)
    ends = f"{number(100 * share['low'], 0)} to {number(100 * share['high'], 0)}"
    return f'{number(100 * share["estimate"], 1)} <span class="soft">[{ends}]</span>'


def draw_subsets(axes: Any, values: Sequence[Mapping[str, Any]]) -> None:
    """Draw, for each value, how often the longer completion is chosen, and the floor, with intervals."""
    shown = values[::-1]
    for offset, color, key, label in (
        (0.14, BLUE, "longer_where_they_differ", "longer one chosen, where lengths differ"),
        (-0.14, ORANGE, "floor", "label predicted without reading (floor)"),
    ):
        found = [(at, each[key]) for at, each in enumerate(shown) if each[key]]
        found = [(at, share) for at, share in found if share["low"] is not None]
        x, y = [share["estimate"] for _, share in found], [at + offset for at, _ in found]
        below, above = [share["low"] for _, share in found], [share["high"] for _, share in found]
        errors = np.maximum([np.subtract(x, below), np.subtract(above, x)], 0)
        axes.errorbar(x, y, xerr=errors, fmt="o", color=color, markersize=6, linewidth=2, label=label)
    axes.axvline(0.5, color=GREY, linewidth=1)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_yticks(range(len(shown)), [_short(each["value"]) for each in shown])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("share of pairs")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), fontsize=10)


def _short(name: str) -> str:
    """A value as far as it can be drawn: matplotlib reads $ as mathematics."""
    line = " ".join(name.split())
    return (line if len(line) <= _LONGEST_NAME else f"{line[: _LONGEST_NAME - 1]}…").replace("$", r"\$")
