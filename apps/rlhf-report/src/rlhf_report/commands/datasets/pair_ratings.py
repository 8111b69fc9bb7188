"""`rlhf-report pair-ratings`: pairs out of rated answers."""

from __future__ import annotations

from typing import Literal

import click

from rlhf_report.options import bad_row_option, explained

_SHOWN_EVERY = 5000


@click.command("pair-ratings")
@click.argument("data", nargs=-1, required=True, metavar="DATA...")
@click.option(
    "--rating",
    "ratings",
    multiple=True,
    required=True,
    metavar="COLUMN",
    help="Column of ratings, higher is better; repeatable, the mean counts.",
)
@click.option("--out", required=True, metavar="DIR", help="Folder for pairs.jsonl and report.json.")
@click.option(
    "--min-gap",
    type=click.FloatRange(0),
    default=0,
    show_default=True,
    help="Minimum difference of a pair's ratings, exclusive.",
)
@click.option(
    "--columns",
    multiple=True,
    metavar="NAME=COLUMN",
    help="Column that holds prompt or completion; repeatable.",
)
@bad_row_option("What to do with a row that has no rated answer.")
@explained
def command(
    data: tuple[str, ...],
    ratings: tuple[str, ...],
    out: str,
    min_gap: float,
    columns: tuple[str, ...],
    on_bad_row: Literal["error", "skip"],
) -> None:
    """Make pairs from rated answers, such as HelpSteer's: the best answer to a prompt against the worst.

    Rows have a prompt, a completion (or response) and ratings; the rows of one prompt may be anywhere.
    """
    from rlhf_data import pair_ratings
    from rlhf_report.options import named_columns

    named = named_columns(columns, ("prompt", "completion"))

    def show(count: int) -> None:
        if count % _SHOWN_EVERY == 0:
            click.echo(f"{count} rows read (each is read twice)", err=True)

    counts = pair_ratings(
        data, ratings, out, min_gap=min_gap, columns=named, on_bad_row=on_bad_row, on_rows=show
    )
    click.echo(
        f"{counts['pairs']} pairs of {counts['prompts']} prompts and {counts['rows']} answers; left out: "
        f"{counts['single']} prompts with one answer, {counts['ties']} with equal ratings, "
        f"{counts['bad_rows']} bad rows"
    )
    click.echo(f"written to {out}/pairs.jsonl")
