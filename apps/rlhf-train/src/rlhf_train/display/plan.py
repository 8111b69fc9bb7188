"""Output shared by the dry runs of all commands."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def device_table(rows: Sequence[dict[str, str]]) -> Table:
    """Devices of all models."""
    table = Table(title="Device plan", title_justify="left", box=box.ROUNDED)
    for name in ("role", "device", "dtype", "reason"):
        table.add_column(name)
    for row in rows:
        table.add_row(*(row[str(column.header)] for column in table.columns))
    return table


def warning_line(text: str) -> Text:
    """A highlighted line."""
    return Text.assemble(("warning: ", "bold yellow"), text)
