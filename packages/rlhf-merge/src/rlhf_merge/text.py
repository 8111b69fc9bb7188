"""Numbers, sizes and names as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

bytes_text = decimal
"""Bytes with a decimal unit: 766.8 kB."""


def share_text(value: float | None) -> str:
    """A share in percent with three digits, never rounded to none or all: 12.3%, <0.001%, >99.9%."""
    if value is None or not math.isfinite(value):
        return "∞" if value == math.inf else "–"
    percent = 100 * value
    if 99.95 <= percent < 100 or 0 < percent < 0.001:
        return ">99.9%" if percent > 1 else "<0.001%"
    return f"{percent:.0f}%" if percent >= 100 else f"{percent:.3g}%"


def number_text(value: float | None, form: str = ".3g") -> str:
    """A number with three digits, or in another form; a dash for none."""
    return "–" if value is None or math.isnan(value) else format(value, form)


def plain(value: float | None) -> float | None:
    """A number for JSON, which knows neither NaN nor infinities: null."""
    return value if value is not None and math.isfinite(value) else None


def count_text(value: int) -> str:
    """A count with three digits and k, M, B or T."""
    power = min(4, int(math.log10(max(value, 1) * 1.000501)) // 3)
    return f"{value / 1000**power:.3g}{('', 'k', 'M', 'B', 'T')[power]}"


def table(first: str, *others: str) -> Table:
    """An empty table: names in the first column, folded where there is no room, numbers in the others."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    made.add_column(Text(first), overflow="fold", min_width=min(9, len(first) + 4))
    for header in others:
        made.add_column(Text(header), justify="right", no_wrap=True)
    return made


def short_names(specs: Sequence[str]) -> list[str]:
    """Names for models in tables: the end of each path or id, as long as it takes to tell them apart."""
    parts = [
        [[word for word in part.split("/") if word not in ("", ".")] or [part] for part in spec.split("+")]
        for spec in specs
    ]
    names: list[str] = []
    for length in range(1, max((len(words) for of in parts for words in of), default=0) + 1):
        names = ["+".join("/".join(words[-length:]) for words in of) for of in parts]
        if len(set(names)) == len(set(specs)):
            break
    return [
        f"{name} ({names[:index].count(name) + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def clipped(name: str, length: int) -> str:
    """A name, without its middle where it is too long."""
    end = (length - 1) // 2
    return name if len(name) <= length else f"{name[: length - 1 - end]}…{name[len(name) - end :]}"
