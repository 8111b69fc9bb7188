"""The console that every command prints to."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_PLAIN_WIDTH = 120


def make_console() -> Console:
    """A console as wide as the terminal; elsewhere lines stay whole and tables get 120 columns."""
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(highlight=False, soft_wrap=not terminal, width=width)
