"""`rlhf-report explore`: what is in preference data, before anything is trained on it."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.options import bad_row_option, explained, report_dir_option


@click.command("explore")
@click.argument("data", nargs=-1, metavar="[DATA]...")
@click.option(
    "--columns",
    multiple=True,
    metavar="NAME=COLUMN",
    help="Column that holds prompt, messages, chosen or rejected; repeatable.",
)
@click.option(
    "--by",
    multiple=True,
    metavar="COLUMN",
    help="Column by whose values pairs are measured separately; repeatable.",
)
@click.option("--tokenizer", metavar="MODEL", help="Also count tokens of this model's tokenizer.")
@click.option("--subset-size", type=click.IntRange(1), metavar="N", help="Maximum number of pairs.")
@click.option(
    "--samples",
    default=10,
    show_default=True,
    type=click.IntRange(0),
    help="Examples of each kind in the report.",
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of splits and samples."
)
@bad_row_option("What to do with a row that is not a pair.")
@report_dir_option("exploration")
@click.option("--json", "as_json", is_flag=True, help="Print exploration.json instead of text.")
@explained
def command(**options: Any) -> None:
    """Describe preference data: lengths, duplicates, leaks, shortcuts to the label, flipped labels.

    DATA is a file, a folder, a pattern such as 'shards/*.jsonl.gz', or a data set on the hub
    (owner/name[/part]:split), of pairs with chosen and rejected. Of several, prompts that are in more than
    one are counted. Without DATA: pairs of the story world.
    """
    from rlhf_report.explore.run import run_explore

    click.echo(run_explore(options))
