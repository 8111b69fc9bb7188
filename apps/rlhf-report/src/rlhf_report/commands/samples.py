"""`rlhf-report samples`: completions of models for the same prompts, side by side."""

from __future__ import annotations

from pathlib import Path

import click

from rlhf_report.options import explained

_SELECTIONS = ("stratified", "random", "best", "worst", "disagree")
_FORMATS = ("md", "jsonl", "csv", "html")


@click.command("samples")
@click.argument("sources", nargs=-1, required=True, metavar="[NAME=]SOURCE...")
@click.option(
    "--per-model", default=20, type=click.IntRange(1), show_default=True, help="Number of prompts to show."
)
@click.option(
    "--select",
    "how",
    type=click.Choice(_SELECTIONS),
    default="stratified",
    show_default=True,
    help="stratified: over quantiles of the last model's score; best, worst: by mean score; disagree: "
    "where the models' scores differ most.",
)
@click.option("--score", metavar="COLUMN", help="Score column.  [default: score, reward or reward_score]")
@click.option("--seed", default=0, show_default=True, help="Seed of the selection.")
@click.option(
    "--format",
    "formats",
    default=",".join(_FORMATS),
    show_default=True,
    metavar="LIST",
    help="Files to write, separated by commas: md, jsonl, csv, html.",
)
@click.option(
    "--output-dir",
    "--out-dir",
    "out_dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("samples"),
    show_default=True,
    help="Folder for samples.md and the others.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@explained
def command(
    sources: tuple[str, ...],
    per_model: int,
    how: str,
    score: str | None,
    seed: int,
    formats: str,
    out_dir: Path,
    overwrite: bool,
) -> None:
    """Show the models' completions of the same prompts side by side.

    SOURCE is a run folder (its completions from the start and the end of training), the folder of an
    evaluation, samples of lm-eval, a log of inspect-ai, or a file of rows with a prompt and a completion,
    such as `rlhf-serve generate` writes.
    """
    from rlhf_data import UserError, atomic_write_text, ensure_writable_folder
    from rlhf_eval.samples import FORMATS, matched, read_source, select_cases

    wanted = [each.strip() for each in formats.split(",") if each.strip()]
    if not wanted or any(each not in FORMATS for each in wanted):
        raise UserError(
            f"--format {formats!r}: expected some of {', '.join(_FORMATS)}, with commas between",
            code="invalid_option",
        )
    paths = {name: out_dir / f"samples.{name}" for name in wanted}
    if not overwrite and (there := [str(path) for path in paths.values() if path.exists()]):
        raise UserError(
            f"{', '.join(there)} exists; choose another --output-dir, or give --overwrite", code="file_exists"
        )
    models = {}
    for source in sources:
        for name, completions in read_source(source, score=score).items():
            if name in models:
                raise UserError(
                    f"two models are called {name!r}; tell them apart with NAME=SOURCE", code="repeated_name"
                )
            models[name] = completions
    cases = matched(models)
    chosen = select_cases(cases, how, per_model, seed=seed)  # pyright: ignore[reportArgumentType]
    note = f"{len(chosen)} of the {len(cases)} prompts that {', '.join(models)} answered. "
    note += f"Selected: {how}, seed {seed}."
    ensure_writable_folder(out_dir)
    for name, path in paths.items():
        atomic_write_text(path, FORMATS[name](chosen, "Completions side by side", note))
    click.echo(note)
    click.echo("wrote " + ", ".join(str(path) for path in paths.values()))
