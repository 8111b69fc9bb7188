"""`rlhf-report pack`: data of any form as shards that can be streamed."""

from __future__ import annotations

import sys
from typing import Any

import click

from rlhf_report.options import bad_row_option, explained


@click.command("pack")
@click.argument("data", nargs=-1, required=True)
@click.option("--out", required=True, metavar="DIR", help="New folder for the shards.")
@click.option(
    "--format",
    "shard_format",
    default="parquet",
    show_default=True,
    type=click.Choice(["parquet", "arrow", "lmdb", "jsonl"]),
    help="Format of the shards; with lmdb, DIR becomes an LMDB folder.",
)
@click.option("--rows-per-shard", type=click.IntRange(1), help="Rows per file.  [default: 1048576]")
@bad_row_option("What to do with a row that cannot be read.")
@explained
def command(data: tuple[str, ...], out: str, **options: Any) -> None:
    """Write data as shards that can be read in any order, for training with streaming=true.

    DATA are files of any form, folders, patterns, or names on the hub, one after another. The folder appears
    once it is complete; an interrupted run starts again.
    """
    from rlhf_data import write_shards

    def progress(rows: int) -> None:
        if sys.stderr and sys.stderr.isatty():
            click.echo(f"\r{rows:,} rows", err=True, nl=False)

    made = write_shards(data, out, on_progress=progress, **options)
    if sys.stderr and sys.stderr.isatty():
        click.echo(err=True)
    if made["bad_rows"]:
        click.echo(f"left out: {made['bad_rows']:,} bad rows; the first: {made['skipped'][0]}", err=True)
    count = len(made["shards"])
    click.echo(
        f"{made['rows']:,} rows in {count:,} shard{'s' if count > 1 else ''} of {made['format']}: {out}"
    )
