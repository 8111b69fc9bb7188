"""The console that every command prints to, and a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

_PLAIN_WIDTH = 120


class _UnheardConsole(Console):
    """Prints on into nothing once the reader of standard output has gone, which ends no run."""

    def on_broken_pipe(self) -> None:
        """See `rich.console.Console.on_broken_pipe`, which ends the process."""
        self.quiet = True
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def make_console() -> Console:
    """A console as wide as the terminal; elsewhere lines stay whole and tables get 120 columns."""
    terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed when the process began
    width = None if terminal or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return _UnheardConsole(highlight=False, soft_wrap=not terminal, width=width)


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; its value is called with how much more is done. A log gets one line."""
    console = Console(stderr=True, highlight=False)
    if total and not console.is_terminal:
        console.print(what, soft_wrap=True)
    with Progress(console=console, transient=True, disable=not (total and console.is_terminal)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def device_table(rows: Sequence[dict[str, str]]) -> Table:
    """Devices of all models."""
    names = ("role", "device", "dtype", "reason")
    table = Table(*names, title="Device plan", title_justify="left", box=box.ROUNDED)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def warning_line(text: str) -> Text:
    """A highlighted line."""
    return Text.assemble(("warning: ", "bold yellow"), text)
