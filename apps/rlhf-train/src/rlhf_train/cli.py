"""The command `rlhf-train`: parses, calls the library, prints."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from rlhf_train.options import decorated, model_option, run_options, settings_options

OFFLINE_METHODS = {
    "sft": "Supervised fine-tuning: write as the rows do.",
    "reward": "Reward model: score texts, from pairs of a better and a worse one.",
    "prm": "Process reward model: score every step of a solution.",
    "dpo": "Direct preference optimisation, on pairs and a reference.",
    "simpo": "SimPO: preference optimisation on pairs, without a reference.",
    "kto": "KTO: learn from completions that are labelled good or bad.",
}
"""What `rlhf_algos.METHODS` trains, with the first line of each command's help."""

_BACKENDS = ("rlhf", "trl")
_ON_BAD_ROW = ("error", "skip")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlhf-train")
def main() -> None:
    """Train language models to answer well, and to be hard to fool."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # a sentence says what failed, not every retry
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # rows may hold what the terminal cannot show


def _minmax(**options: Any) -> None:
    """MinMax RLHF: a policy answers, a monitor criticises; each learns against the other.

    Without arguments it builds a tiny policy, a flawed reward model and a judge, shows how plain RLHF
    exploits the flaw, and plays the game, which does not.
    """
    from rlhf_train.minmax import run_minmax

    _exit_cleanly(lambda: run_minmax(options))


def _minmax_options() -> list[Any]:
    return [
        *settings_options(),
        model_option("--model", "Model of both players.  [default: a tiny one, built now]"),
        model_option("--reward-model", "Reward model.  [default: built from the rows]"),
        model_option("--judge-model", "Judge with a scalar head.  [default: built from the rows]"),
        *run_options(
            "minmax",
            rows="Question-answering rows.  [default: the story world]",
            held_out="Held-out rows.  [default: 3 in 10 of the training file]",
            start="the start models",
            seed=0,
        ),
        click.option(
            "--no-baseline", is_flag=True, help="Skip the plain RLHF run that the game is compared with."
        ),
        click.option(
            "--rebuild-demo", is_flag=True, help="Build the tiny models even where they are cached."
        ),
    ]


def _offline_command(method: str, summary: str) -> click.Command:
    """The command of an offline method."""

    def command(**options: Any) -> None:
        from rlhf_train.offline import run_offline

        _exit_cleanly(lambda: run_offline(method, options))

    options = [
        *settings_options(),
        model_option("--model", "Model to start from.  [default: a tiny one, built now]"),
        *run_options(
            method,
            rows="Training rows: a file, a `datasets` folder or a hub name.  [default: the story world]",
            held_out="Held-out rows.  [default: 1 in 10 of the training rows]",
            start="the start model",
            seed=42,
        ),
        click.option(
            "--subset-size", type=click.IntRange(min=1), metavar="N", help="Use the first N training rows."
        ),
        click.option(
            "--on-bad-row",
            type=click.Choice(_ON_BAD_ROW),
            help="Stop at a row that cannot be used, or skip and count it.  [default: error]",
        ),
        click.option(
            "--backend",
            type=click.Choice(_BACKENDS),
            help="This engine, or TRL's own trainer on the same data.  [default: rlhf]",
        ),
    ]
    help_text = (
        f"{summary}\n\nWithout arguments it trains a tiny model, built now, on rows of the story world; the "
        "run folder it names at the end holds the model, metrics, results and curves."
    )
    return click.command(method, help=help_text)(decorated(command, options))


def _exit_cleanly(job: Callable[[], None]) -> None:
    """Run a job; a user's mistake becomes one sentence and exit code 2, Ctrl-C 130 and SIGTERM 143."""
    from rlhf_data import UserError

    try:
        job()
    except UserError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        notes = getattr(stop, "__notes__", ["nothing was begun"])
        click.echo(f"Stopped; {'; '.join(notes)}", err=True)
        sys.exit(getattr(stop, "exit_code", 130))


minmax = main.command("minmax")(decorated(_minmax, _minmax_options()))
for _method, _summary in OFFLINE_METHODS.items():
    main.add_command(_offline_command(_method, _summary))
