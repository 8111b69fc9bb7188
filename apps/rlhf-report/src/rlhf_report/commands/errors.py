"""`rlhf-report errors`: what a reward model gets wrong, on pairs or on prompts with several completions."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.failures import explained
from rlhf_report.options import bad_row_option


@click.command("errors")
@click.option(
    "--reward-model",
    "--reward",
    "reward",
    metavar="MODEL",
    help="Reward model or ensemble, or any reward that rlhf-train takes: a rule, code, a URL. "
    "Rows with several completions may have scores instead.",
)
@click.option(
    "--data",
    required=True,
    metavar="FILE",
    help="Rows that it was not trained on: preference pairs, or prompts with several completions, as "
    "RewardBench 2 has them.",
)
@click.option("--baseline-model", metavar="MODEL", help="Another reward, on the same rows, to compare with.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    help="Rows to take at most.  [default: 1000 pairs, all prompts with several completions]",
)
@click.option("--examples", default=20, show_default=True, type=click.IntRange(0), help="Cases of each kind.")
@click.option(
    "--slice", "slices", multiple=True, metavar="COLUMN", help="Column to show accuracy by; may be repeated."
)
@click.option(
    "--columns", multiple=True, metavar="NAME=COLUMN", help="The file's name of prompt, chosen or rejected."
)
@click.option(
    "--completions",
    metavar="FILE",
    help="Prompts with several completions, for the best of N under --held-out-reward.",
)
@click.option("--held-out-reward", metavar="MODEL", help="The reward that judges the best of N.")
@bad_row_option("What to do with a row that cannot be read.")
@click.option("--output-dir", metavar="DIR", help="Folder of the report; default outputs/errors-<time>.")
@explained
def command(**options: Any) -> None:
    """Say what a reward model gets wrong: calibration, length, slices, flips, and the cases to read."""
    from rlhf_report.errors.run import report_errors

    click.echo(report_errors(options))
