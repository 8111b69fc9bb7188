"""`rlhf-report validate`: flaws of completions."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.options import dtype_option, explained, report_dir_option


@click.command("validate")
@click.argument("data", metavar="DATA")
@click.option(
    "--reference",
    metavar="MODEL",
    help="Language model, not the policy, that measures likelihood and order of sentences.",
)
@click.option(
    "--human", metavar="FILE", help="Good completions, by which --reference flags others; at least 30."
)
@click.option(
    "--nli",
    metavar="MODEL",
    help="Model of natural language inference, by which sentences are compared with the row's source.",
)
@click.option(
    "--source",
    metavar="COLUMN",
    help="With --nli: column of the source.  [default: source, context, story, passage or document]",
)
@click.option(
    "--max-flagged",
    type=click.FloatRange(0, 1),
    help="Exit with 1 if a larger share has a flaw, by the lower end of its interval.",
)
@dtype_option("the models'")
@report_dir_option("validation")
@explained
def command(**options: Any) -> None:
    """Look for flaws of completions that need no right answer.

    DATA has rows with prompt and completion, such as the output of `rlhf-serve generate`. It finds
    repetition, echo of the prompt, another language, an end in the middle of a sentence, and empty ones; with
    --reference and --human also unlikely and bland ones, and sentences in a wrong order; with --nli sentences
    that contradict the row's source.
    """
    from rlhf_report.validate import run_validation

    if run_validation(options):
        raise SystemExit(1)
