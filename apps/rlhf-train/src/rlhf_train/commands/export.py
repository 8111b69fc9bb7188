"""`rlhf-train export`: a plain model folder from a run's checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from rlhf_algos import export_checkpoint
from rlhf_data import RunFolder, UserError


def export(source: str, folder: str) -> None:
    """Write the model of a checkpoint, or of a run's newest one, and say where.

    Raises:
        UserError: the checkpoint is missing or damaged, or the folder exists.
    """
    checkpoint = Path(source)
    if not checkpoint.is_dir():
        raise UserError(
            f"{source} is not a folder; name a run or one of its checkpoints", code="not_a_folder"
        )
    if not checkpoint.name.startswith("checkpoint-"):
        newest = RunFolder(checkpoint).latest_checkpoint()
        if newest is None:
            raise UserError(f"{source} has no checkpoint; name another run", code="no_checkpoint")
        checkpoint = newest
    export_checkpoint(checkpoint, folder)
    click.echo(f"the model of {checkpoint}: {folder}")
