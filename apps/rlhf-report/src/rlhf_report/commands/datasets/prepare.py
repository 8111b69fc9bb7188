"""`rlhf-report prepare`: data cleaned, cut and split for training."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.options import bad_row_option, explained


def _number(name: str, meaning: str) -> Any:
    return click.option(name, type=int, metavar="N", help=meaning)


def _share(name: str, meaning: str) -> Any:
    return click.option(name, type=float, metavar="X", help=meaning)


def _choice(name: str, values: str, meaning: str) -> Any:
    return click.option(name, type=click.Choice(values.split(", ")), help=meaning)


@click.command("prepare")
@click.argument("data", nargs=-1, required=True, metavar="DATA...")
@click.option(
    "--out", metavar="DIR", help="Folder for train.jsonl, eval.jsonl, dropped.jsonl and the report."
)
@click.option("--overwrite", is_flag=True, help="Replace the folder of an earlier prepare.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, and write nothing.")
@click.option("--config", metavar="FILE", help="YAML or JSON file of the settings below, such as ties: keep.")
@_choice(
    *("--kind", "preference, sft, kto, prompt"),
    "Kind of rows.  [default: inferred from the first row's columns]",
)
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
@_number("--contamination-words", "Shared consecutive words that count as contamination.  [13]")
@_choice("--ties", "drop, keep, margin0", "What to do with nearly equal completions.  [drop]")
@_share("--tie-similarity", "Similarity from which completions are a tie.  [0.95]")
@_number("--min-words", "Minimum words of a completion.  [1]")
@_number("--min-tokens", "Minimum tokens of a completion.  [1]")
@_choice("--duplicate-rows", "none, exact, near", "Duplicate rows to remove.  [exact]")
@_choice("--duplicate-prompts", "none, exact, near", "Duplicate prompts to remove.  [none]")
@_choice(
    *("--contradictions", "drop, majority, keep"),
    "Same texts, opposite labels: drop all, or keep the majority.  [drop]",
)
@_number("--max-length", "Maximum length of a row in tokens or words.  [no limit]")
@_choice(
    *("--truncation", "left, middle, drop, right"),
    "How longer rows are shortened: by whole turns from the start or the middle of prompts; "
    "completions stay whole.  [left]",
)
@_share("--eval-fraction", "Share of rows to hold out.  [0.1]")
@_choice(
    *("--stratify-by", "length, source, both, none"),
    "Property with the same distribution in held-out rows as in all.  [length]",
)
@_number("--strata", "Number of quantile bins of length.  [10]")
@_choice("--group-prompts", "exact, near", "Which prompts stay on one side of the split together.  [exact]")
@_choice("--margins", "keep, ratings, similarity", "What to do with margins of pairs.  [keep]")
@_choice("--convert", "none, messages", "Convert transcripts to messages.  [none]")
@_share("--near-threshold", "Jaccard index from which rows are near duplicates.  [0.8]")
@_choice("--near-unit", "words, characters", "Unit of shingles.  [words]")
@_number("--near-size", "Words or characters per shingle.  [5]")
@_number("--seed", "Seed of the held-out split.  [42]")
@bad_row_option("What to do with a row that cannot be read.")
@explained
def command(**options: Any) -> None:
    """Prepare training data: clean rows, shorten long ones, and hold some out.

    DATA is what rlhf-train --train-data takes, once or several times. The result is the same for rows in any
    order and in any number of files. Every row that is left out is counted by its reason, with file and line.
    """
    from rlhf_report.prepare.run import run_prepare

    run_prepare(options)
