"""`rlhf-report prepare`: data cleaned, cut and split for training."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.failures import explained


@click.command("prepare")
@click.argument("data", nargs=-1, required=True, metavar="DATA...")
@click.option(
    "--out", metavar="DIR", help="Folder for train.jsonl, eval.jsonl, dropped.jsonl and the report."
)
@click.option("--overwrite", is_flag=True, help="Replace a folder that an earlier prepare wrote.")
@click.option("--dry-run", is_flag=True, help="Say what it would do, and write nothing.")
@click.option("--config", metavar="FILE", help="YAML or JSON file of the settings below, as ties: keep.")
@click.option(
    "--kind", type=click.Choice(["preference", "sft", "kto", "prompt"]),
    help="What rows are.  [default: what the columns of the first one say]",
)  # fmt: skip
@click.option("--columns", multiple=True, metavar="NAME=COLUMN", help="The files' name of a column.")
@click.option("--source-column", metavar="COLUMN", help="Names a row's source.  [default: its file does]")
@click.option("--tokenizer", metavar="MODEL", help="Count tokens of this model, not words.")
@click.option(
    "--against", multiple=True, metavar="FILE",
    help="Evaluation file whose texts must not be among the rows; may be repeated.",
)  # fmt: skip
@click.option("--contamination-words", type=int, metavar="N", help="Words in a row shared with it.  [13]")
@click.option(
    "--ties", type=click.Choice(["drop", "keep", "margin0"]), help="Nearly equal completions.  [drop]"
)
@click.option("--tie-similarity", type=float, metavar="X", help="From which completions are a tie.  [0.95]")
@click.option("--min-words", type=int, metavar="N", help="Words of a completion at least.  [1]")
@click.option("--min-tokens", type=int, metavar="N", help="Tokens of a completion at least.  [1]")
@click.option(
    "--duplicate-rows", type=click.Choice(["none", "exact", "near"]), help="Rows to keep once.  [exact]"
)
@click.option(
    "--duplicate-prompts", type=click.Choice(["none", "exact", "near"]), help="Prompts to keep once.  [none]"
)
@click.option(
    "--contradictions", type=click.Choice(["drop", "majority", "keep"]),
    help="Same texts, opposite labels: drop all, or keep what most say.  [drop]",
)  # fmt: skip
@click.option("--max-length", type=int, metavar="N", help="Tokens, or words, of a row at most.  [no limit]")
@click.option(
    "--truncation", type=click.Choice(["left", "middle", "drop", "right"]),
    help="How longer rows get shorter: whole turns from the start, or from the middle, of prompts; "
    "completions stay whole.  [left]",
)  # fmt: skip
@click.option("--eval-fraction", type=float, metavar="X", help="Share of rows to hold out.  [0.1]")
@click.option(
    "--stratify-by", type=click.Choice(["length", "source", "both", "none"]),
    help="What held-out rows share with all.  [length]",
)  # fmt: skip
@click.option("--strata", type=int, metavar="N", help="Quantile bins of length.  [10]")
@click.option(
    "--group-prompts", type=click.Choice(["exact", "near"]), help="Prompts that stay on one side.  [exact]"
)
@click.option(
    "--margins", type=click.Choice(["keep", "ratings", "similarity"]), help="Margins of pairs.  [keep]"
)
@click.option("--convert", type=click.Choice(["none", "messages"]), help="Transcripts to messages.  [none]")
@click.option("--near-threshold", type=float, metavar="X", help="Jaccard index of near duplicates.  [0.8]")
@click.option("--near-unit", type=click.Choice(["words", "characters"]), help="Of shingles.  [words]")
@click.option("--near-size", type=int, metavar="N", help="Words or characters of a shingle.  [5]")
@click.option("--seed", type=int, metavar="N", help="Of the choice of held-out rows.  [42]")
@click.option(
    "--on-bad-row", type=click.Choice(["error", "skip"]), default="error", show_default=True,
    help="What to do with a row that cannot be read.",
)  # fmt: skip
@explained
def command(**options: Any) -> None:
    """Clean rows, cut long ones, and hold some out: files that training takes as they are.

    DATA is what rlhf-train --train-data takes, once or several times. The result is the same for rows in any
    order and in any number of files. Every row that is left out is counted by its reason, with file and line.
    """
    from rlhf_report.prepare.run import run_prepare

    run_prepare(options)
