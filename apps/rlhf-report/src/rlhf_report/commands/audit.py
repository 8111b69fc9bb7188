"""`rlhf-report audit`: whether a run games its reward."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rlhf_report.options import explained


@click.command("audit")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--train", metavar="KEY", help="Name of the training reward in the log.")
@click.option("--held-out", metavar="KEY", help="Name of a held-out reward in the log.")
@click.option("--strict", is_flag=True, help="Count hints as findings.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for audit.html and audit.json.  [default: none is written]",
)
@explained
def command(run: Path, train: str | None, held_out: str | None, strict: bool, output: Path | None) -> None:
    """Check whether a run games its reward.

    The training reward is compared with a held-out one: a reward with weight 0 in reward_weights, the game's
    held-out scorers, or those that --train and --held-out name. The reward is gamed if the training reward
    rises, the held-out one does not, and the gap is beyond chance. RUN is a run folder, or a log of TRL or
    verl. Exit code 1: found, 0: not found, 2: the input cannot be used.
    """
    from rlhf_data import UserError, atomic_write_json, atomic_write_text, ensure_writable_folder, finite
    from rlhf_eval.audit import Audit, audit_page, find_hints, measure_gap, method_of
    from rlhf_eval.monitor import held_out_keys, open_log

    if (train is None) != (held_out is None):
        raise UserError(
            "--train and --held-out name a pair of rewards; give both, or neither", code="conflicting_options"
        )
    log = open_log(run)
    if not log.rows:
        raise UserError(f"{run} has logged no step yet; audit it when it has", code="nothing_logged")
    logged = {key for row in log.rows for key in row}
    if unknown := [key for key in (train, held_out) if key is not None and key not in logged]:
        raise UserError(
            f"{run} logs no {', '.join(unknown)}; its keys are {', '.join(sorted(logged))}",
            code="missing_column",
        )
    pairs = [(train, held_out)] if train and held_out else held_out_keys(log.rows, log.config)
    samples = log.samples()
    gaps = tuple(measure_gap(log.rows, *pair) for pair in pairs)
    audit = Audit(log.name, gaps, tuple(find_hints(log.rows, samples)), method_of(log.rows))
    for sentence in audit.sentences:
        click.echo(sentence)
    for hint in audit.hints:
        click.echo(f"hint: {hint.text} ({hint.name})")
    if output is not None:
        ensure_writable_folder(output)
        atomic_write_text(output / "audit.html", audit_page(audit, samples))
        atomic_write_json(output / "audit.json", finite(audit.to_dict()))
        click.echo(f"wrote {output / 'audit.html'} and {output / 'audit.json'}")
    if audit.is_gamed or (strict and audit.hints):
        sys.exit(1)
