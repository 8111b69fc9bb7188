"""Estimates with their intervals, one line each: inline SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_eval.html import text

_NAME_PIXELS, _TICK_PIXELS = 9, 7.5
"""Width of a letter of a name, and of one of a value beside it."""
Rows = Sequence[tuple[str, dict[str, Any]]]


def interval_plot(title: str, rows: Rows, shown: Callable[[float], str], *, rate: bool = False) -> str:
    """Draw it in two widths; the page shows the one that fits.

    Args:
        title: What it shows, for readers who cannot see it.
        rows: Name, and a dictionary of `estimate`, `low` and `high`; ends that are None are not drawn.
        shown: A value as text.
        rate: Whether values are rates, which are shown in percent.
    """
    return "<figure>" + "".join(_plot(title, rows, shown, rate, width) for width in (340, 960)) + "</figure>"


def _plot(title: str, rows: Rows, shown: Callable[[float], str], rate: bool, width: int) -> str:
    ends = [row[key] for _, row in rows for key in ("low", "estimate", "high") if row[key] is not None]
    margin = 0.06 * (max(ends) - min(ends)) or 0.05 * max(abs(max(ends)), 1)
    left, right = min(ends) - margin, max(ends) + margin
    if rate:
        left, right = max(left, 0.0), min(right, 1.0)

    def x(value: float) -> str:
        return f"{20 + (width - 40) * (value - left) / (right - left):.1f}"

    height, top = 46, 8
    bottom = top + height * len(rows)
    parts = []
    for tick in _ticks(left, right, 4 if width < 600 else 8):
        label = text(shown(tick).removesuffix(".0")) + "%" * rate
        parts.append(f'<line class="rule" x1="{x(tick)}" y1="{top}" x2="{x(tick)}" y2="{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{x(tick)}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
        )
    for index, (full, row) in enumerate(rows):
        y = top + height * index
        known = row["low"] is not None
        interval = f" [{shown(row['low'])}, {shown(row['high'])}]" if known else ""
        value = shown(row["estimate"]) + interval
        longest = max(6, int((width - 50 - _TICK_PIXELS * len(value)) / _NAME_PIXELS))
        name = full if len(full) <= longest else full[: longest - 1] + "…"
        parts.append(f'<text class="name" x="20" y="{y + 16}">{text(name)}</text>')
        parts.append(
            f'<text class="tick" x="{width - 20}" y="{y + 16}" text-anchor="end">{text(value)}</text>'
        )
        if known:
            across = f'x1="{x(row["low"])}" x2="{x(row["high"])}" y1="{y + 31}" y2="{y + 31}"'
            parts.append(f'<line class="interval" {across}/>')
        parts.append(f'<circle class="estimate" cx="{x(row["estimate"])}" cy="{y + 31}" r="5"/>')
    kind, size = "narrow" if width < 600 else "wide", f'viewBox="0 0 {width} {bottom + 28}"'
    return f'<svg class="plot {kind}" role="img" aria-label="{text(title)}" {size}>{"".join(parts)}</svg>'


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two ends, equally far apart."""
    steps = sorted(factor * 10.0**exponent for exponent in range(-12, 13) for factor in (1, 2, 5))
    step = next((step for step in steps if (high - low) / step <= most), high - low)
    first = int(-(-low // step))
    return [round(k * step, 12) for k in range(first, int(high // step) + 1)]
