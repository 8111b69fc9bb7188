"""The command `rlhf-train`: parses, calls the library, prints."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from rlhf_algos import METHODS
from rlhf_data import exit_cleanly, output_written
from rlhf_eval.html import written_by
from rlhf_train.options import (
    compare_options,
    decorated,
    distributed_option,
    machine_options,
    model_config_option,
    model_option,
    pipeline_options,
    reward_option,
    run_options,
    settings_options,
)

if TYPE_CHECKING:
    from rlhf_data.worlds.dummy import DummyKind

_BACKENDS = ("rlhf", "trl")
_STAGES = ("sft", "reward", "ppo", "rlhf")
_ON_BAD_ROW = ("error", "skip")

_METHOD_MODULE = "--method-module"

_exit_cleanly = partial(exit_cleanly, stopped="Stopped; nothing was begun")


class _Commands(click.Group):
    """The commands, and those of methods from files (`--method-module`) and installed packages."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run the command line; output that cannot be written ends it with a sentence."""
        given = sys.argv[1:] if args is None else args
        with output_written(), written_by(["rlhf-train", *given]):
            return super().main(args, *rest, **extra)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Take `--method-module FILE` out of a command's arguments too, and load the file first."""
        kept: list[str] = []
        rest = iter(args)
        for argument in rest:
            option, equals, file = argument.partition("=")
            if option != _METHOD_MODULE:
                kept.append(argument)
            elif file or (file := "" if equals else next(rest, "")):
                _load_methods(file)
            else:
                raise click.UsageError(f"Option '{_METHOD_MODULE}' requires an argument.", ctx)
        return super().resolve_command(ctx, kept)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        from rlhf_train.plugins import installed_methods

        return sorted({*super().list_commands(ctx), *installed_methods()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; None if there is none."""
        from rlhf_train.plugins import installed_methods

        found = super().get_command(ctx, cmd_name)
        entry = None if found else installed_methods().get(cmd_name)
        if entry is None:
            return found
        # Whether it is online is known only once it is loaded, so it may be given rewards.
        return _training_command(cmd_name, f"A method of {entry.value}.", online=True, installed=True)


def _load_methods(file: str) -> None:
    """Add the methods of a file to the commands."""
    from rlhf_train.plugins import load_methods

    names: list[str] = []
    _exit_cleanly(lambda: names.extend(load_methods(file)))
    for name in names:
        summary = METHODS[name].summary or f"A method of {file}."
        main.add_command(_training_command(name, summary, online=METHODS[name].online))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    _METHOD_MODULE,
    multiple=True,
    expose_value=False,
    is_eager=True,
    metavar="FILE",
    callback=lambda ctx, parameter, files: [_load_methods(file) for file in files],
    help="Python file that adds methods to rlhf_algos.METHODS, which become commands; accepted before and "
    "after a command.",
)
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
    from rlhf_train.commands.minmax import run_minmax

    _exit_cleanly(lambda: run_minmax(options))


def _minmax_options() -> list[Any]:
    return [
        *settings_options(),
        model_option("--model", "Model of both players.  [default: a tiny one, built from the rows]"),
        model_option("--policy", "Model of the player that answers.  [default: --model]"),
        model_option("--monitor", "Model of the player that criticises.  [default: --model]"),
        model_option("--reward-model", "Reward model.  [default: built from the rows]"),
        model_option("--judge-model", "Judge with a scalar head.  [default: built from the rows]"),
        *run_options(
            "minmax",
            rows="Question-answering rows.  [default: the story world]",
            held_out="Held-out rows.  [default: 3 in 10 of the training file]",
            start="the start models",
            seed=0,
        ),
        *machine_options(),
        click.option("--no-baseline", is_flag=True, help="Skip the run of plain RLHF for comparison."),
        _bad_row_option(),
        distributed_option(),
        click.option(
            "--force",
            is_flag=True,
            help="Play, with a warning, even if a check says that the game cannot work.",
        ),
        click.option("--rebuild-demo", is_flag=True, help="Rebuild the tiny models even if they are cached."),
        click.option(
            "--quick",
            is_flag=True,
            help="A first look in a minute or two: models that come with the package, and fewer steps and "
            "stories; --set and other options change it.",
        ),
    ]


def _training_command(method: str, summary: str, *, online: bool, installed: bool = False) -> click.Command:
    """The command of a method of `rlhf_algos.METHODS`, or of one that an installed package adds."""

    def command(**options: Any) -> None:
        from rlhf_train.commands.training import run_training

        if installed:
            from rlhf_train.plugins import load_installed

            _exit_cleanly(lambda: load_installed(method))
        _exit_cleanly(lambda: run_training(method, options))

    options = [
        *settings_options(),
        model_option("--model", "Model to start from.  [default: a tiny one, built from the rows]"),
        model_config_option(),
        *run_options(
            method,
            rows="Training rows: a file, a `datasets` folder or a hub name.  [default: the story world]",
            held_out="Held-out rows.  [default: 1 in 10 of the training rows]",
            start="the start model",
            seed=42,
        ),
        *machine_options(),
        click.option(
            "--subset-size", type=click.IntRange(min=1), metavar="N", help="Use the first N training rows."
        ),
        _bad_row_option(),
        distributed_option(),
        reward_option() if online else _backend_option(),
    ]
    help_text = (
        f"{summary}\n\nWithout arguments it trains a tiny model on rows of the story world; the "
        "run folder printed at the end has the model, metrics, results and curves."
    )
    return click.command(method, help=help_text, epilog=_epilog(method))(decorated(command, options))


def _rlhf(**options: Any) -> None:
    """Traditional RLHF: supervised fine-tuning, a reward model, and PPO against it, without an adversary.

    Without arguments it runs on stories, with the models of `rlhf-train minmax`, whose reward model has a
    flaw, which plain RLHF exploits.
    """
    from rlhf_train.commands.rlhf import run_rlhf

    _exit_cleanly(lambda: run_rlhf(options))


def _rlhf_options() -> list[Any]:
    rows = run_options("rlhf", rows="", held_out="", start="the start models", seed=0)
    return [
        *settings_options(),
        model_option(
            "--model", "Model that the first stage starts from.  [default: a tiny one, built from the rows]"
        ),
        model_config_option(),
        model_option("--reward-model", "Reward model for PPO.  [default: that of the stage reward]"),
        click.option(
            "--data", metavar="DIR", help="Folder with sft.jsonl, preference.jsonl and prompts.jsonl."
        ),
        click.option(
            "--create-dummy-data",
            metavar="DIR",
            help="Write example rows into DIR first, and train on them as with --data DIR.",
        ),
        click.option("--sft-data", metavar="FILE", help="Rows of the stage sft."),
        click.option("--preference-data", metavar="FILE", help="Rows of the stage reward."),
        click.option("--prompt-data", metavar="FILE", help="Rows of the stage ppo."),
        click.option(
            "--stage",
            multiple=True,
            type=click.Choice(_STAGES),
            help="Run this stage only; repeatable; rlhf is ppo.  [default: sft, reward, ppo]",
        ),
        _bad_row_option(),
        *rows[2:],
    ]


def _compare(**options: Any) -> None:
    """Train several methods at equal budgets and compare them, with intervals over seeds.

    METHODS are those that train a policy, such as dpo grpo ppo. Every run starts from one model; the
    policies during it answer the same held-out prompts, whose reward, length and KL are measured.
    """
    from rlhf_train.commands.compare import run_compare

    _exit_cleanly(lambda: run_compare(options))


def _pipeline(**options: Any) -> None:
    """Run stages, each a job with its own processes; promote models only after their gates have passed.

    A stage whose settings, files and upstream results are those of an earlier run is not run again, so the
    same command continues after an interruption. Exit code 1: a gate has ended the pipeline.
    """
    from rlhf_train.commands.pipeline import run_pipeline

    stopped: list[bool] = []
    _exit_cleanly(lambda: stopped.append(run_pipeline(options)))
    sys.exit(int(stopped[0]))


def _bad_row_option() -> Any:
    return click.option(
        "--on-bad-row",
        type=click.Choice(_ON_BAD_ROW),
        help="Stop at a row that cannot be used, or skip and count it.  [default: error]",
    )


def _backend_option() -> Any:
    return click.option(
        "--backend",
        type=click.Choice(_BACKENDS),
        help="This engine, or TRL's own trainer on the same data.  [default: rlhf]",
    )


def _epilog(method: str) -> str:
    return f"All settings for --set and --config: rlhf-train settings {method}"


@main.command("dummy-data")
@click.argument("folder", metavar="DIR")
@click.option("--rows", type=click.IntRange(min=2), default=256, show_default=True, help="Rows of each file.")
@click.option(
    "--kind",
    type=click.Choice(("story", "arithmetic", "chat")),
    default="story",
    show_default=True,
    help="Content of the rows; chat is stories as chat messages.",
)
@click.option("--seed", type=int, default=0, show_default=True)
def dummy_data(folder: str, rows: int, kind: DummyKind, seed: int) -> None:
    """Write example rows for every method, and in every form that is read.

    DIR gets a README.md with the commands that train on them.
    """
    from rlhf_train.commands.dummy_data import create_dummy_data

    _exit_cleanly(lambda: create_dummy_data(folder, rows=rows, kind=kind, seed=seed))


@main.command("fetch")
@click.argument("what", type=click.Choice(("configs",)), metavar="configs")
@click.argument("folder", metavar="[DIR]", default="configs")
def fetch(what: str, folder: str) -> None:
    """Write the configs that come with this package into a new folder.

    They are commented settings to start from, for --config, with presets for 7B and 70B and recipes of
    pipelines. DIR is configs by default.
    """
    from rlhf_train.commands.fetch import fetch_configs

    _exit_cleanly(lambda: fetch_configs(folder))


@main.command("export")
@click.argument("source", metavar="RUN|CHECKPOINT")
@click.argument("folder", metavar="DIR")
def export(source: str, folder: str) -> None:
    """Write the model of a checkpoint as a plain transformers folder, new, named DIR.

    Of a run the newest checkpoint is taken. Checkpoints of FSDP and ZeRO-3 runs are put together a layer at
    a time, in one process, however many wrote them.
    """
    from rlhf_train.commands.export import export as run

    _exit_cleanly(lambda: run(source, folder))


@main.command("settings")
@click.argument("method")
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects.")
def settings(method: str, as_json: bool) -> None:
    """List the settings of a command, with defaults, allowed values and meaning."""
    from rlhf_train.settings import print_settings

    _exit_cleanly(lambda: print_settings(method, as_json=as_json))


@main.command("schema")
@click.argument("method")
def schema(method: str) -> None:
    """Print the JSON schema of a command's config, with which editors check and complete it."""
    from rlhf_train.settings import print_schema

    _exit_cleanly(lambda: print_schema(method))


@main.command("doctor")
@click.option("--port", type=click.IntRange(1, 65535), help="Also check that a server could use this port.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects.")
@click.pass_context
def doctor(ctx: click.Context, port: int | None, as_json: bool) -> None:
    """Check this machine: versions, devices, memory, disk, locks; exit code 2 where a run would fail."""
    from rlhf_train.commands.doctor import run_doctor

    if not run_doctor(port=port, as_json=as_json):
        ctx.exit(2)


minmax = main.command("minmax", epilog=_epilog("minmax"))(decorated(_minmax, _minmax_options()))
rlhf = main.command("rlhf", epilog=_epilog("rlhf"))(decorated(_rlhf, _rlhf_options()))
compare = main.command("compare")(decorated(_compare, compare_options()))
pipeline = main.command("pipeline")(decorated(_pipeline, pipeline_options()))
for _name, _method in METHODS.items():
    main.add_command(_training_command(_name, _method.summary, online=_method.online))
