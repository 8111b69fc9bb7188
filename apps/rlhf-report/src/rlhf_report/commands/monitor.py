"""`rlhf-report monitor`: runs in progress, in the terminal and as a local page."""

from __future__ import annotations

from pathlib import Path

import click

from rlhf_report.options import explained

_SHORTEST = 0.1
_PLOTS = ("all", "reward", "loss", "kl", "lengths", "learning", "time", "memory", "workers")


@click.command("monitor")
@click.argument("runs", nargs=-1, metavar="[RUN...]", type=click.Path(path_type=Path))
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    default=Path("outputs"),
    show_default=True,
    help="Folder of runs; without RUN the newest ones are shown.",
)
@click.option("--plot", type=click.Choice(_PLOTS), default="all", show_default=True, help="Metrics to show.")
@click.option("--once", is_flag=True, help="Show them once and exit, as without a terminal.")
@click.option("--interval", default=5.0, type=float, show_default=True, help="Seconds between updates.")
@click.option(
    "--serve",
    "port",
    type=click.IntRange(0, 65535),
    help="Port of a page on 127.0.0.1; 0 takes a free one.",
)
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for the curves as PNG."
)
@click.option(
    "--alert-command",
    metavar="COMMAND",
    help="Command to run for each new alert, with RLHF_RUN, RLHF_RULE, RLHF_STEP and RLHF_TEXT.",
)
@explained
def command(
    runs: tuple[Path, ...],
    log_dir: Path,
    plot: str,
    once: bool,
    interval: float,
    port: int | None,
    output: Path | None,
    alert_command: str | None,
) -> None:
    """Follow runs: progress, metrics and alerts.

    RUN is a run folder, finished or not; a folder in which TRL saves checkpoints; or a log:
    metrics.jsonl, verl's JSON lines, a trainer_state.json. With a terminal, --serve or --alert-command it
    follows until all runs are finished, or until Ctrl-C.
    """
    from rlhf_data import UserError
    from rlhf_report.watch.follow import Options, follow

    if not interval >= _SHORTEST:
        raise UserError(
            f"--interval {interval}: expected {_SHORTEST:g} seconds or more", code="invalid_option"
        )
    options = Options(plot, interval, port, output, alert_command, once=once)
    follow(runs, log_dir, options)
