"""Options that several commands have."""

from __future__ import annotations

from typing import Any

import click


def bad_row_option(meaning: str) -> Any:
    """The option `--on-bad-row`: error or skip."""
    return click.option(
        "--on-bad-row",
        default="error",
        show_default=True,
        type=click.Choice(["error", "skip"]),
        help=meaning,
    )
