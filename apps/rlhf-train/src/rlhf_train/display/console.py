"""The console that every command prints to, and a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

_PLAIN_WIDTH = 120


def make_console() -> Console:
    """A console as wide as the terminal; elsewhere lines stay whole and tables get 120 columns."""
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(highlight=False, soft_wrap=not terminal, width=width)


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; its value is called with how much more is done. A log gets one line."""
    console = Console(stderr=True, highlight=False)
    if total and not console.is_terminal:
        console.print(what, soft_wrap=True)
    with Progress(console=console, transient=True, disable=not (total and console.is_terminal)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
