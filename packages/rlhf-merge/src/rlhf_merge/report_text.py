"""Numbers and names as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def share_text(value: float | None) -> str:
    """A share in percent with three digits, never rounded to none or all: 12.3%, <0.001%, >99.9%."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    percent = 100 * value
    if 99.95 <= percent < 100:
        return ">99.9%"
    if 0 < percent < 0.001:
        return "<0.001%"
    return f"{percent:.0f}%" if percent >= 100 else f"{percent:.3g}%"


def number_text(value: float | None) -> str:
    """A number with three digits; a dash for none."""
    return "–" if value is None or math.isnan(value) else f"{value:.3g}"


def cosine_text(value: float | None) -> str:
    """A number in [-1, 1] with three decimals; a dash for none."""
    return "–" if value is None else f"{round(value, 3) + 0:.3f}"


def plain(value: float | None) -> float | None:
    """A number for JSON, which knows neither NaN nor infinities: null."""
    return value if value is not None and math.isfinite(value) else None


def table(first: str, *others: str) -> Table:
    """An empty table: names in the first column, folded where there is no room, numbers in the others."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    made.add_column(Text(first), overflow="fold", min_width=min(9, len(first) + 4))
    for header in others:
        made.add_column(Text(header), justify="right", no_wrap=True)
    return made


def count_text(value: int) -> str:
    """A count with three digits and k, M, B or T."""
    return _scaled(value, ("", "k", "M", "B", "T"))


def bytes_text(value: int) -> str:
    """Bytes with three digits and a decimal unit."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB"))


def short_names(specs: Sequence[str]) -> list[str]:
    """Names for models in tables: the end of each path or id, as long as it takes to tell them apart."""
    parts = [[_ending_words(part) for part in spec.split("+")] for spec in specs]
    longest = max((len(words) for of in parts for words in of), default=1)
    names: list[str] = []
    for length in range(1, longest + 1):
        names = ["+".join("/".join(words[-length:]) for words in of) for of in parts]
        if len(set(names)) == len(set(specs)):
            break
    return [
        f"{name} ({names[:index].count(name) + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def clipped(name: str, length: int) -> str:
    """A name, without its middle where it is too long."""
    if len(name) <= length:
        return name
    end = (length - 1) // 2
    return f"{name[: length - 1 - end]}…{name[len(name) - end :]}"


def _ending_words(part: str) -> list[str]:
    return [word for word in part.split("/") if word not in ("", ".")] or [part]


def _scaled(value: int, units: Sequence[str]) -> str:
    scaled, index = float(value), 0
    while scaled >= 999.5 and index < len(units) - 1:
        scaled, index = scaled / 1000, index + 1
    return f"{value}{units[0]}" if index == 0 else f"{scaled:.3g}{units[index]}"
