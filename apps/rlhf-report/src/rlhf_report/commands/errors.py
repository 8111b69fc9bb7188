"""`rlhf-report errors`: errors of a reward model, on pairs or on prompts with several completions."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.options import bad_row_option, explained, report_dir_option


@click.command("errors")
@click.option(
    "--reward-model",
    "--reward",
    "reward",
    metavar="MODEL",
    help="Reward model, ensemble, or any other reward of rlhf-train: a rule, code, a URL. "
    "Rows with several completions may have scores instead.",
)
@click.option(
    "--data",
    required=True,
    metavar="FILE",
    help="Rows not trained on: preference pairs, or prompts with several completions, as in RewardBench 2.",
)
@click.option("--baseline-model", metavar="MODEL", help="Another reward to compare with, on the same rows.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    help="Maximum number of rows.  [default: 1000 pairs, all prompts with several completions]",
)
@click.option(
    "--examples",
    default=20,
    show_default=True,
    type=click.IntRange(0),
    help="Examples of each kind of error.",
)
@click.option(
    "--slice",
    "slices",
    multiple=True,
    metavar="COLUMN",
    help="Column by whose values accuracy is shown; repeatable.",
)
@click.option(
    "--columns", multiple=True, metavar="NAME=COLUMN", help="Column that holds prompt, chosen or rejected."
)
@click.option(
    "--completions",
    metavar="FILE",
    help="Prompts with several completions, for the best of N under --held-out-reward.",
)
@click.option("--held-out-reward", metavar="MODEL", help="Reward that scores the best of N.")
@bad_row_option("What to do with a row that cannot be read.")
@report_dir_option("errors")
@explained
def command(**options: Any) -> None:
    """Analyse the errors of a reward model: calibration, length, slices, flips, and cases to read."""
    from rlhf_report.errors.run import report_errors

    click.echo(report_errors(options))
