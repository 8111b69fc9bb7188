"""`rlhf-report prepare`: data cleaned, cut and split for training."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.options import explained


@click.command("prepare")
@click.argument("data", nargs=-1, required=True, metavar="DATA...")
@click.option(
    "--out", metavar="DIR", help="Folder for train.jsonl, eval.jsonl, dropped.jsonl and the report."
)
@click.option("--overwrite", is_flag=True, help="Replace the folder of an earlier prepare.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, and write nothing.")
@click.option("--config", metavar="FILE", help="YAML or JSON file of the settings below, such as ties: keep.")
@click.option(
    "--kind", type=click.Choice(["preference", "sft", "kto", "prompt"]),
    help="Kind of rows.  [default: inferred from the first row's columns]",
)  # fmt: skip
@click.option(
    "--columns", multiple=True, metavar="NAME=COLUMN", help="Column under another name in the files."
)
@click.option(
    "--source-column", metavar="COLUMN", help="Column that names a row's source.  [default: its file]"
)
@click.option("--tokenizer", metavar="MODEL", help="Count tokens of this model instead of words.")
@click.option(
    "--against", multiple=True, metavar="FILE",
    help="Evaluation file whose texts must not occur in the rows; repeatable.",
)  # fmt: skip
@click.option(
    "--contamination-words",
    type=int,
    metavar="N",
    help="Shared consecutive words that count as contamination.  [13]",
)
@click.option(
    "--ties",
    type=click.Choice(["drop", "keep", "margin0"]),
    help="What to do with nearly equal completions.  [drop]",
)
@click.option(
    "--tie-similarity", type=float, metavar="X", help="Similarity from which completions are a tie.  [0.95]"
)
@click.option("--min-words", type=int, metavar="N", help="Minimum words of a completion.  [1]")
@click.option("--min-tokens", type=int, metavar="N", help="Minimum tokens of a completion.  [1]")
@click.option(
    "--duplicate-rows",
    type=click.Choice(["none", "exact", "near"]),
    help="Duplicate rows to remove.  [exact]",
)
@click.option(
    "--duplicate-prompts",
    type=click.Choice(["none", "exact", "near"]),
    help="Duplicate prompts to remove.  [none]",
)
@click.option(
    "--contradictions", type=click.Choice(["drop", "majority", "keep"]),
    help="Same texts, opposite labels: drop all, or keep the majority.  [drop]",
)  # fmt: skip
@click.option(
    "--max-length", type=int, metavar="N", help="Maximum length of a row in tokens or words.  [no limit]"
)
@click.option(
    "--truncation", type=click.Choice(["left", "middle", "drop", "right"]),
    help="How longer rows are shortened: by whole turns from the start or the middle of prompts; "
    "completions stay whole.  [left]",
)  # fmt: skip
@click.option("--eval-fraction", type=float, metavar="X", help="Share of rows to hold out.  [0.1]")
@click.option(
    "--stratify-by", type=click.Choice(["length", "source", "both", "none"]),
    help="Property with the same distribution in held-out rows as in all.  [length]",
)  # fmt: skip
@click.option("--strata", type=int, metavar="N", help="Number of quantile bins of length.  [10]")
@click.option(
    "--group-prompts",
    type=click.Choice(["exact", "near"]),
    help="Which prompts stay on one side of the split together.  [exact]",
)
@click.option(
    "--margins",
    type=click.Choice(["keep", "ratings", "similarity"]),
    help="What to do with margins of pairs.  [keep]",
)
@click.option(
    "--convert", type=click.Choice(["none", "messages"]), help="Convert transcripts to messages.  [none]"
)
@click.option(
    "--near-threshold",
    type=float,
    metavar="X",
    help="Jaccard index from which rows are near duplicates.  [0.8]",
)
@click.option("--near-unit", type=click.Choice(["words", "characters"]), help="Unit of shingles.  [words]")
@click.option("--near-size", type=int, metavar="N", help="Words or characters per shingle.  [5]")
@click.option("--seed", type=int, metavar="N", help="Seed of the held-out split.  [42]")
@click.option(
    "--on-bad-row", type=click.Choice(["error", "skip"]), default="error", show_default=True,
    help="What to do with a row that cannot be read.",
)  # fmt: skip
@explained
def command(**options: Any) -> None:
    """Prepare training data: clean rows, shorten long ones, and hold some out.

    DATA is what rlhf-train --train-data takes, once or several times. The result is the same for rows in any
    order and in any number of files. Every row that is left out is counted by its reason, with file and line.
    """
    from rlhf_report.prepare.run import run_prepare

    run_prepare(options)
