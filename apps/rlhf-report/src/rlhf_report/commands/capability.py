"""`rlhf-report capability`: what a model can do, and whether it has lost any of it."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.options import dtype_option, explained, max_new_tokens_option, report_dir_option


@click.command("capability")
@click.option("--model", required=True, metavar="MODEL", help="Model, run folder or adapter.")
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    help="Built-in suite: stories, sums, copying, instructions, refusals, text; repeatable.  [default: all]",
)
@click.option(
    "--file",
    "files",
    multiple=True,
    metavar="NAME=FILE",
    help="A suite of your own, from a file of rows; repeatable.",
)
@click.option(
    "--rows",
    default=200,
    show_default=True,
    type=click.IntRange(2),
    help="Maximum number of items of a built-in suite.",
)
@max_new_tokens_option(64, "an answer")
@dtype_option()
@click.option(
    "--before", metavar="DIR", help="Report of the model before training, to test for regressions against."
)
@click.option(
    "--margin",
    default=0.02,
    show_default=True,
    type=click.FloatRange(0),
    help="With --before: loss of a suite that does not matter.",
)
@report_dir_option("capability")
@explained
def command(**options: Any) -> None:
    """Measure a model on offline suites: stories, sums, copying, instructions, refusals, plain text.

    With --before, every suite is tested for being no worse than there, by paired tests; exit code 1 if one
    has become worse.
    """
    from rlhf_report.capability import run_capability

    if run_capability(options):
        raise SystemExit(1)
