"""The options that every command of `rlhf-train` takes; a command adds its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rlhf_data import SettingsSource

NEWEST = "<newest unfinished run>"
SEED_LIMIT = (1 << 31) - 1

Decorator = Callable[[Any], Any]


def decorated(command: Any, options: list[Decorator]) -> Any:
    """Give a command options, which its help lists in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def flag_of(name: str) -> str:
    """The flag whose value is the option of this name."""
    return "--set" if name == "overrides" else f"--{name.replace('_', '-')}"


def settings_source(
    method: str, options: dict[str, Any], keys_of: Mapping[str, Sequence[str]]
) -> SettingsSource:
    """The source of a command's settings: the config file, and the options given beside it.

    Args:
        method: the name of the command in `rlhf-train settings`; empty where it has none.
        options: the command's.
        keys_of: the keys that each option is the value of.
    """
    from rlhf_data import SettingsSource, overrides_given  # late, as help needs neither

    flags = [
        (key, flag_of(name))
        for name, keys in keys_of.items()
        if not any(options.get(name) is nothing for nothing in (None, False, ()))
        for key in keys
    ]
    distributed = options.get("distributed")
    files = [("distributed", str(distributed))] if distributed else []
    given = (*files, *overrides_given(options["overrides"]), *flags)
    listed_by = f"rlhf-train settings {method}" if method else ""
    return SettingsSource(str(options["config"] or "config"), given, listed_by)


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


def machine_options() -> list[Decorator]:
    """`--processes` and `--gpu`, of a dry run."""
    return [
        click.option(
            "--processes",
            type=click.IntRange(min=1),
            metavar="N",
            help="With --dry-run: plan for N processes.  [default: those that run]",
        ),
        click.option(
            "--gpu",
            metavar="NAME|SIZE",
            help="With --dry-run: plan for this GPU in each process, such as H100 or 24GB; exit code 2 if it "
            "cannot hold the job.",
        ),
    ]


def model_config_option() -> Decorator:
    """`--model-config`."""
    return click.option(
        "--model-config",
        metavar="FILE",
        help="YAML or JSON file with the shape of a model that starts from random weights.",
    )


def run_options(job: str, *, rows: str, held_out: str, start: str, seed: int) -> list[Decorator]:
    """Data, output folder, resuming, length, seed, evaluation alone and the dry run.

    `rows` and `held_out` are the help of `--train-data` and `--eval-data`; `start` is what `--eval-only`
    evaluates without `--resume`.
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
        click.option("--max-steps", type=click.IntRange(min=1), help="Number of steps; replaces --epochs."),
        click.option(
            "--epochs", type=click.FloatRange(min=0, min_open=True), help="Passes over the training rows."
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0, max=SEED_LIMIT),
            help=f"Seed of everything, including built models.  [default: {seed}]",
        ),
        click.option(
            "--eval-only", is_flag=True, help=f"Evaluate {start}, or the last checkpoint of --resume DIR."
        ),
        click.option(
            "--dry-run", is_flag=True, help="Check everything, estimate tokens and memory, train nothing."
        ),
    ]


def reward_option() -> Decorator:
    """`--reward`."""
    return click.option(
        "--reward",
        multiple=True,
        metavar="SOURCE",
        help="Reward of completions: a reward model's folder or hub name, pkg.mod:function, a URL, or a "
        "rule such as number, choice, exact, length, format; repeatable.  [default: the task's own]",
    )


_DISTRIBUTED = (
    "YAML or JSON file of the settings of `distributed`: train in processes on a Ray cluster, or sample there"
)


def distributed_option(more: str = "; with --resume, with others than before.") -> Decorator:
    """`--distributed`; `more` is the end of its help."""
    return click.option("--distributed", type=click.Path(), metavar="FILE", help=_DISTRIBUTED + more)


def compare_options() -> list[Decorator]:
    """The options of `rlhf-train compare`."""
    return [
        click.argument("methods", nargs=-1),
        model_option("--model", "Model that every run starts from."),
        click.option(
            "--train-data", metavar="FILE", help="Rows for all methods; pairs also serve as prompts."
        ),
        click.option("--preference-data", metavar="FILE", help="Separate rows for the offline methods."),
        click.option(
            "--eval-data", metavar="FILE", help="Held-out prompts on which every policy is measured."
        ),
        click.option(
            "--reward",
            multiple=True,
            metavar="SOURCE",
            help="Reward that online methods maximise; the first one measures every policy; repeatable.",
        ),
        click.option("--held-out-reward", metavar="SOURCE", help="Reward that no method is trained on."),
        click.option(
            "--budget",
            metavar="UNIT=N",
            help="Budget of each run in steps, samples, tokens or seconds, such as tokens=200000.",
        ),
        click.option(
            "--seeds", metavar="N,N", help="Seeds; each method runs once per seed.  [default: 0,1,2]"
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="[METHOD.]KEY=VALUE",
            help="A setting of all methods, or of one; repeatable.",
        ),
        click.option(
            "--sweep",
            multiple=True,
            metavar="METHOD.KEY=A,B",
            help="Compare values of one setting of a method, such as its KL coefficient; repeatable.",
        ),
        distributed_option(" (online methods)."),
        *_measurement_options(),
        click.option(
            "--output-dir", metavar="DIR", help="Folder for all runs.  [default: outputs/compare-<time>]"
        ),
        click.option(
            "--resume",
            is_flag=False,
            flag_value=NEWEST,
            metavar="[DIR]",
            help="Continue an interrupted comparison.  [default: the newest unfinished]",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Check everything, show what would be run, train nothing."
        ),
    ]


def _measurement_options() -> list[Decorator]:
    """How the policies of a comparison are measured."""
    return [
        click.option(
            "--evaluations",
            type=click.IntRange(min=1),
            help="Measurements during each run, including its end.  [default: 4]",
        ),
        click.option(
            "--max-prompts",
            type=click.IntRange(min=2),
            help="Maximum number of held-out prompts.  [default: 200]",
        ),
        click.option(
            "--max-new-tokens",
            type=click.IntRange(min=1),
            help="Maximum length of a measured completion.  [default: 128]",
        ),
        click.option(
            "--temperature",
            type=click.FloatRange(min=0),
            help="Temperature of measured completions.  [default: 1]",
        ),
    ]


def pipeline_options() -> list[Decorator]:
    """The options of `rlhf-train pipeline`."""
    return [
        *settings_options(),
        click.option(
            "--output-dir",
            metavar="DIR",
            help="Folder of the pipeline.  [default: outputs/pipeline-<config>]",
        ),
        click.option(
            "--resume", metavar="DIR", help="Continue the pipeline of a folder, with its own settings."
        ),
        click.option("--stage", multiple=True, metavar="STAGE", help="Run this stage only; repeatable."),
        click.option("--from", "from_stage", metavar="STAGE", help="First stage to run."),
        click.option("--until", metavar="STAGE", help="Last stage to run."),
        click.option(
            "--dry-run", is_flag=True, help="Check every stage, show what would run, and run nothing."
        ),
        click.option(
            "--price-per-hour",
            type=click.FloatRange(min=0),
            metavar="PRICE",
            help="With --dry-run: price of this machine for an hour, in any currency.",
        ),
    ]
