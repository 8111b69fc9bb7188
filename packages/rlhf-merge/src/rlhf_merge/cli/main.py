"""The command `rlhf-merge`: parses, calls the library, prints."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from rlhf_merge.methods.families import METHODS, PARAMETERS

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Size(click.ParamType):
    """A number of bytes, such as 500MB, 5GB or 2G."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes of a size."""
        if isinstance(value, int):
            return value
        text = value.strip().upper().removesuffix("B")
        unit = text[-1:] if text[-1:] in _UNITS else ""
        try:
            size = float(text.removesuffix(unit)) * _UNITS[unit]
        except ValueError:
            self.fail(f"{value!r} is not a size; give one in KB, MB, GB or TB, such as 2GB", param, ctx)
        if not 1 <= size < 1e18:
            self.fail(f"{value!r} is out of range; give a size such as 2GB", param, ctx)
        return int(size)


_SIZE = Size()
_THREADS = click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Tensors at once.  [default: one per core]"
)
_RESOURCES = (
    _THREADS,
    click.option("--max-memory", type=_SIZE, help="Most memory the process may take, such as 2GB."),
)
_RESTART = click.option(
    "--restart", is_flag=True, help="Discard what an interrupted run left, instead of going on."
)
_QUIET = click.option("--quiet", is_flag=True, help="Print nothing but errors.")
_OUTPUT = (
    click.option(
        "--max-shard-size", type=_SIZE, default="5GB", show_default=True, help="Size of the result's files."
    ),
    _RESTART,
    click.option("--dry-run", is_flag=True, help="Check everything and show the plan; write nothing."),
    _QUIET,
)
_MODEL_OPTIONS = (
    click.option(
        "--dtype", metavar="TYPE", help="float32, float16, bfloat16 or float64.  [default: the base's]"
    ),
    click.option(
        "--vocab",
        metavar="HOW",
        help="union, truncate, base or a model, where vocabularies differ.  [default: they must agree]",
    ),
    click.option(
        "--ignore",
        multiple=True,
        metavar="PATTERN",
        help="Leave these tensors out, which only some models have, such as 'v_head.*'; repeat.",
    ),
)
_OUT = click.argument("out", type=click.Path(), metavar="OUT")
_CONFIG = click.argument("config", type=click.Path(dir_okay=False), metavar="CONFIG")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _by(*rows: str) -> Callable[..., Any]:
    return click.option("--by", type=click.Choice(rows), default="layer", show_default=True, help="Rows.")


def _decorated(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class _Commands(click.Group):
    """The commands below, and one for each method."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; output that cannot be written ends it with a sentence."""
        with output_written():
            return super().main(*args, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return sorted([*super().list_commands(ctx), *(name.replace("_", "-") for name in METHODS)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        name = cmd_name.replace("-", "_")
        return super().get_command(ctx, cmd_name) or (_method_command(name) if name in METHODS else None)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlhf-merge")
def main() -> None:
    """Merge language models: streamed, resumable, checked.

    A model is a folder, a hub id, or either with +ADAPTER. Each method is a command; `run` takes a file, also
    one of mergekit's.
    """


@main.command()
@_decorated(_CONFIG, _OUT, *_RESOURCES, *_OUTPUT)
def run(config: str, out: str, **options: Any) -> None:
    """Merge as a YAML or JSON file says, of our own schema or of mergekit's."""
    _call("merge_config_file", config, out, **options)


@main.command()
@_decorated(_CONFIG, *_RESOURCES, _JSON)
def plan(config: str, **options: Any) -> None:
    """Show what a config would read and write, and the memory it needs; merge nothing."""
    _call("show_plan", config, **options)


@main.command()
@_decorated(
    _OUT,
    click.option("--model", "models", multiple=True, required=True, metavar="MODEL", help="A model; repeat."),
    click.option(
        "--evaluate",
        metavar="COMMAND",
        help="Greedy soup, by the number this shell command prints last; {model} is the folder to score.",
    ),
    click.option("--lower-is-better", is_flag=True, help="The number is a loss."),
    click.option("--base", metavar="MODEL", help="Lends config and tokenizer.  [default: the first model]"),
    *_MODEL_OPTIONS,
    *_RESOURCES,
    _RESTART,
    _QUIET,
)
def soup(out: str, **options: Any) -> None:
    """Mean of models: of all, or with --evaluate of those that make it better."""
    _call("cook_soup", out, **options)


@main.command()
@_decorated(click.argument("model"), _by("layer", "tensor"), _JSON, _THREADS)
def inspect(model: str, **options: Any) -> None:
    """Show a model's tensors: types, sizes, norms, zeros, NaN."""
    _call("show_model", model, **options)


@main.command()
@_decorated(
    click.argument("models", nargs=-1, required=True, metavar="A B..."),
    click.option("--base", metavar="MODEL", help="What all models are fine-tunes of.  [default: A]"),
    click.option(
        "--density", type=click.FloatRange(0, 1, min_open=True), help="Compare signs of trimmed task vectors."
    ),
    _by("layer", "kind", "tensor"),
    click.option("--png", type=click.Path(dir_okay=False), metavar="FILE", help="Draw a heat map."),
    _JSON,
    _THREADS,
)
def diff(models: tuple[str, ...], **options: Any) -> None:
    """Compare models: norms and sign conflicts of their task vectors, layer by layer."""
    _call("show_difference", models, **options)


def _method_command(name: str) -> click.Command:
    """The command of a method."""
    method = METHODS[name]

    def command(out: str, base: str | None, models: tuple[str, ...], **options: Any) -> None:
        _call("merge_by_options", name, out, base, models, options)

    required = method.base == "required"
    use = "The base model." if required else "Lends config and tokenizer.  [default: the first model]"
    weighted = "weight" in method.parameters
    model_help = "A model to merge; repeat." + (" With its weight, 1 where left out." if weighted else "")
    options = [
        click.option("--base", required=required, metavar="MODEL", help=use),
        click.option(
            "--model",
            "models",
            multiple=True,
            required=True,
            metavar="MODEL:WEIGHT" if weighted else "MODEL",
            help=model_help,
        ),
        *(_parameter_option(key, default) for key, default in method.parameters.items() if key != "weight"),
        *_MODEL_OPTIONS,
        click.option(
            "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random masks."
        ),
        *_RESOURCES,
        *_OUTPUT,
    ]
    text = f"{method.title}: {method.summary}."
    text += "\n\nA value may be a list over the depth, `0.2,0.8`, and may hold only for tensors whose name "
    text += "contains a word, `mlp=0.5`; repeat the option for several such rules."
    text += f"\n\nPaper: {method.paper}." if method.paper else ""
    return click.command(name.replace("_", "-"), help=text)(_decorated(_OUT, *options)(command))


def _parameter_option(key: str, default: Any) -> Callable[..., Any]:
    rule = PARAMETERS[key]
    shown = str(default).lower() if isinstance(default, bool) else default
    choices = f" ({', '.join(rule.choices)})" if rule.choices else ""
    text = f"{rule.help[0].upper()}{rule.help[1:]}{choices}.  [default: {shown}]"
    return click.option(f"--{key.replace('_', '-')}", f"set_{key}", multiple=True, metavar="VALUE", help=text)


def _call(command: str, *arguments: Any, **options: Any) -> None:
    """Call a function of `commands`; a user's mistake becomes one sentence and exit code 2."""
    from rlhf_merge.errors import MergeError, is_out_of_memory

    signal.signal(signal.SIGTERM, _terminate)
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, _terminate)
    try:
        getattr(importlib.import_module("rlhf_merge.cli.commands"), command)(*arguments, **options)
    except MergeError as error:
        # A name in a damaged file may hold what no terminal takes.
        click.echo(f"Error: {str(error).encode(errors='backslashreplace').decode()}", err=True)
        sys.exit(2)
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        advice = "free some, or set --max-memory or --threads 1, and give the same command again to go on"
        click.echo(f"Error: there is not enough memory ({reason}); {advice}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("Interrupted; give the same command again to go on.", err=True)
        sys.exit(130)


def _terminate(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


@contextmanager
def output_written() -> Iterator[None]:
    """Within this context, that of a whole command, standard output that cannot be written is an error.

    The command ends with a sentence and exit code 2, as on a full disk. A closed pipe (`| head`) is
    not an error.
    """
    try:
        yield
    except OSError:  # of this output or another file
        _exit_if_unwritten("\n")
        raise
    finally:
        _exit_if_unwritten("")


def _exit_if_unwritten(more: str) -> None:
    """Exit where standard output, and this text after it, cannot be written."""
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except BrokenPipeError:
        return
    except OSError as error:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())  # what is left would be written when Python ends
        os.close(nothing)
        reason = (error.strerror or str(error)).lower()
        print(f"Error: standard output cannot be written: {reason}; name another place", file=sys.stderr)
        sys.exit(2)
