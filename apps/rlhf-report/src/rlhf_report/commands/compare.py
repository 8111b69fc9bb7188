"""`rlhf-report compare`: which of several models, or of several training runs, is better."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.failures import explained


@click.command("compare")
@click.argument("files", nargs=-1, required=True, metavar="[NAME=]FILE|RUN...")
@click.option("--baseline", metavar="FILE", help="Outputs that the preferences of the files are against.")
@click.option("--metric", metavar="NAME", help="Score to compare.  [default: the one that all have]")
@click.option("--slice", "slice_by", metavar="COLUMN", help="Report by the values of this column too.")
@click.option(
    "--cluster", metavar="COLUMN", help="Resample prompts together that share this, such as a document."
)
@click.option("--lower-is-better", is_flag=True, help="Less of the metric is better; of a loss it always is.")
@click.option(
    "--threshold", type=float, metavar="VALUE",
    help="Of runs: the metric at which one has converged.  [default: 0.9 of the way to the best end]",
)  # fmt: skip
@click.option(
    "--level", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.95, show_default=True,
    help="Of the intervals.",
)  # fmt: skip
@click.option("--cases", type=click.IntRange(min=0), show_default="4", help="Prompts shown won, and lost.")
@click.option(
    "--output-dir", metavar="DIR", default="comparison", show_default=True,
    help="Where comparison.json, .txt and .html are written.",
)  # fmt: skip
@explained
def command(**options: Any) -> None:
    """Compare models by what they answered to the same prompts, or training runs by their logs.

    A FILE has a row with a score for each prompt: rows with prompt, completion and a number (score, reward,
    correct, preference, ...), AlpacaEval annotations, samples of lm-eval --log_samples, or an inspect-ai log.
    Rows are joined by their prompts.

    A RUN is a run folder, a folder in which TRL saves checkpoints, or verl's JSON lines. Runs of one method,
    or of one NAME, are its seeds; a folder of runs stands for all in it, as <method>/seed-<n>/. They are
    compared by stability, convergence, efficiency and quality.

    The page says what was compared, what came out, and whether that is more than luck.
    """
    from rlhf_report.compare_runs.find import are_runs

    if are_runs(options["files"]):
        from rlhf_report.compare_runs.run import run_compare_runs

        run_compare_runs(options)
    else:
        from rlhf_report.compare.run import run_compare

        run_compare(options)
