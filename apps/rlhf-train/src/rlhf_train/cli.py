"""The command `rlhf-train`: parses, calls the library, prints."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import click

NEWEST = "<newest unfinished run>"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlhf-train")
def main() -> None:
    """Train language models to answer well, and to be hard to fool."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # stories may hold what the terminal cannot show


@main.command()
@click.option("--config", type=click.Path(), help="JSON or YAML file of settings.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one setting; repeatable."
)
@click.option(
    "--model", metavar="PATH|HUB_ID", help="Model of both players.  [default: a tiny one, built now]"
)
@click.option("--reward-model", metavar="PATH|HUB_ID", help="Reward model.  [default: built from the rows]")
@click.option(
    "--judge-model", metavar="PATH|HUB_ID", help="Judge with a scalar head.  [default: built from the rows]"
)
@click.option("--train-data", metavar="FILE", help="Question-answering rows.  [default: the story world]")
@click.option("--eval-data", metavar="FILE", help="Held-out rows.  [default: 3 in 10 of the training file]")
@click.option("--output-dir", metavar="DIR", help="The run's folder.  [default: outputs/minmax-<time>]")
@click.option(
    "--resume",
    is_flag=False,
    flag_value=NEWEST,
    metavar="[DIR]",
    help="Continue an interrupted run, with its own settings.  [default: the newest unfinished]",
)
@click.option("--max-steps", type=click.IntRange(min=1), help="Steps; takes the place of --epochs.")
@click.option(
    "--epochs", type=click.FloatRange(min=0, min_open=True), help="Passes over the training stories."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=(1 << 31) - 1),
    help="Seeds everything, the built models too.  [default: 0]",
)
@click.option(
    "--eval-only", is_flag=True, help="Evaluate the start models, or the last checkpoint of --resume DIR."
)
@click.option("--dry-run", is_flag=True, help="Check everything, estimate tokens and memory, train nothing.")
@click.option("--no-baseline", is_flag=True, help="Skip the plain RLHF run that the game is compared with.")
@click.option("--rebuild-demo", is_flag=True, help="Build the tiny models even where they are cached.")
def minmax(**options: Any) -> None:
    """MinMax RLHF: a policy answers, a monitor criticises; each learns against the other.

    Without arguments it builds a tiny policy, a flawed reward model and a judge, shows how plain RLHF
    exploits the flaw, and plays the game, which does not.
    """
    from rlhf_train.minmax import run_minmax

    _exit_cleanly(lambda: run_minmax(options))


def _exit_cleanly(job: Callable[[], None]) -> None:
    """Run a job; a user's mistake becomes one sentence and exit code 2, Ctrl-C exit code 130."""
    from rlhf_data import UserError

    try:
        job()
    except UserError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("Stopped; continue with --resume.", err=True)
        sys.exit(130)
