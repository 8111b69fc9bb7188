"""`rlhf-train dummy-data`: example rows in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rlhf_data import write_dummy_data

if TYPE_CHECKING:
    from rlhf_data.worlds.dummy import DummyKind


def create_dummy_data(folder: str, *, rows: int = 256, kind: DummyKind = "story", seed: int = 0) -> None:
    """Write the rows and say what was written."""
    written = write_dummy_data(folder, rows, kind=kind, seed=seed)
    for name, count in written.items():
        click.echo(f"{count:6d} rows  {name}")
    click.echo(f"{folder}/README.md has the commands that train on them")
