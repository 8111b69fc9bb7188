"""`rlhf-report compare`: which of several models, or of several training runs, is better."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.options import explained


@click.command("compare")
@click.argument("files", nargs=-1, required=True, metavar="[NAME=]FILE|RUN...")
@click.option("--baseline", metavar="FILE", help="The model that the files' preferences are against.")
@click.option("--metric", metavar="NAME", help="Score to compare.  [default: the one in all files]")
@click.option("--slice", "slice_by", metavar="COLUMN", help="Also report by the values of this column.")
@click.option(
    "--cluster", metavar="COLUMN", help="Column of clusters that are resampled together, such as documents."
)
@click.option(
    "--lower-is-better", is_flag=True, help="Lower values of the metric are better, as for any loss."
)
@click.option(
    "--threshold", type=float, metavar="VALUE",
    help="Value of the metric at which a run has converged.  [default: 0.9 of the way to the best end]",
)  # fmt: skip
@click.option(
    "--level", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.95, show_default=True,
    help="Level of the intervals.",
)  # fmt: skip
@click.option(
    "--cases", type=click.IntRange(min=0), show_default="4", help="Number of won and of lost prompts to show."
)
@click.option(
    "--output-dir", metavar="DIR", default="comparison", show_default=True,
    help="Folder for comparison.json, .txt and .html.",
)  # fmt: skip
@explained
def command(**options: Any) -> None:
    """Compare models by their answers to the same prompts, or training runs by their logs.

    A FILE has a row with a score for each prompt: rows with prompt, completion and a number (score, reward,
    correct, preference, ...), AlpacaEval annotations, samples of lm-eval --log_samples, or an inspect-ai log.
    Rows are joined by their prompts.

    A RUN is a run folder, a folder in which TRL saves checkpoints, or verl's JSON lines. Runs of one method,
    or of one NAME, are its seeds; a folder of runs means all in it, as <method>/seed-<n>/. They are
    compared by stability, convergence, efficiency and quality.

    The page states the result, and whether it is more than chance.
    """
    from rlhf_report.compare_runs.find import are_runs

    if are_runs(options["files"]):
        from rlhf_report.compare_runs.run import run_compare_runs

        run_compare_runs(options)
    else:
        from rlhf_report.compare.run import run_compare

        run_compare(options)
