"""The options that every command of `rlhf-train` takes; a command adds its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

NEWEST = "<newest unfinished run>"
SEED_LIMIT = (1 << 31) - 1

Decorator = Callable[[Any], Any]


def decorated(command: Any, options: list[Decorator]) -> Any:
    """Give a command options, which its help lists in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def settings_options() -> list[Decorator]:
    """`--config` and `--set`."""
    return [
        click.option("--config", type=click.Path(), help="JSON or YAML file of settings."),
        click.option(
            "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one setting; repeatable."
        ),
    ]


def model_option(name: str, text: str) -> Decorator:
    """An option that names a model."""
    return click.option(name, metavar="PATH|HUB_ID", help=text)


def model_config_option() -> Decorator:
    """`--model-config`."""
    return click.option(
        "--model-config",
        metavar="FILE",
        help="YAML or JSON file with the shape of a model that starts from random weights.",
    )


def run_options(job: str, *, rows: str, held_out: str, start: str, seed: int) -> list[Decorator]:
    """Data, output folder, resuming, length, seed, evaluation alone and the dry run.

    Args:
        job: name of the job, with which new run folders begin.
        rows: help of `--train-data`.
        held_out: help of `--eval-data`.
        start: what `--eval-only` evaluates without `--resume`.
        seed: the default one.
    """
    return [
        click.option("--train-data", metavar="FILE", help=rows),
        click.option("--eval-data", metavar="FILE", help=held_out),
        click.option(
            "--output-dir", metavar="DIR", help=f"The run's folder.  [default: outputs/{job}-<time>]"
        ),
        click.option(
            "--resume",
            is_flag=False,
            flag_value=NEWEST,
            metavar="[DIR]",
            help="Continue an interrupted run, with its own settings.  [default: the newest unfinished]",
        ),
        click.option("--max-steps", type=click.IntRange(min=1), help="Steps; takes the place of --epochs."),
        click.option(
            "--epochs", type=click.FloatRange(min=0, min_open=True), help="Passes over the training rows."
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0, max=SEED_LIMIT),
            help=f"Seeds everything, the built models too.  [default: {seed}]",
        ),
        click.option(
            "--eval-only", is_flag=True, help=f"Evaluate {start}, or the last checkpoint of --resume DIR."
        ),
        click.option(
            "--dry-run", is_flag=True, help="Check everything, estimate tokens and memory, train nothing."
        ),
    ]
