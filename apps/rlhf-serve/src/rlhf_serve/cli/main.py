"""The command `rlhf-serve`: parses, calls, prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from rlhf_data import exit_cleanly

_BACKENDS = ("auto", "transformers", "vllm")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_ANSWERS = ("text", "marked", "number")
_LOADING = "loading torch and transformers, which takes some seconds"
_BUILDING = "; without --model the first start also builds a demonstration, which takes minutes"

Decorator = Callable[[Any], Any]


def _model_options() -> list[Decorator]:
    """What is loaded, for both commands; defaults are those of `rlhf_serve.settings`."""
    return [
        click.option("--config", type=click.Path(), help="JSON or YAML file of settings."),
        click.option(
            "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one setting; repeatable."
        ),
        click.option("--model", metavar="PATH|HUB_ID", help="Policy.  [default: a tiny demonstration]"),
        click.option(
            "--reward-model",
            "--reward",
            "reward",
            multiple=True,
            metavar="SOURCE",
            help="What scores candidates: a reward model, an ensemble or a process reward model, "
            "pkg.mod:function, a URL, or a rule; repeatable.",
        ),
        click.option("--n", type=click.IntRange(min=1), help="Candidates per prompt.  [default: 8]"),
        click.option("--backend", type=click.Choice(_BACKENDS), help="What generates.  [default: auto]"),
        click.option("--dtype", type=click.Choice(_DTYPES), help="Of the weights.  [default: as stored]"),
        click.option("--device", metavar="DEVICE", help="Where models are put.  [default: the GPU if any]"),
        click.option("--chat-template", metavar="FILE", help="For a tokenizer that has none."),
        click.option(
            "--answer", type=click.Choice(_ANSWERS), help="What a majority counts.  [default: text]"
        ),
        click.option("--seed", type=click.IntRange(min=0), help="Of the demonstration.  [default: 0]"),
    ]


def _server_options() -> list[Decorator]:
    return [
        click.option("--served-model-name", metavar="NAME", help="What clients call the model."),
        click.option("--host", metavar="ADDRESS", help="Address.  [default: 127.0.0.1, this machine only]"),
        click.option(
            "--port", type=click.IntRange(0, 65535), help="Port; 0 for a free one.  [default: 8000]"
        ),
        click.option("--api-keys-file", metavar="FILE", help="API keys, one a line: `name key` or `key`."),
        click.option(
            "--requests-per-minute", type=click.FloatRange(min=0, min_open=True), help="Limit for each key."
        ),
        click.option("--max-concurrent-per-key", type=click.IntRange(min=1), help="Limit for each key."),
        click.option("--max-n", type=click.IntRange(min=1), help="Most candidates a request may ask for."),
        click.option("--max-tokens", type=click.IntRange(min=1), help="Longest completion in tokens."),
        click.option("--max-waiting", type=click.IntRange(min=0), help="Length of the queue."),
        click.option("--log-prompts", is_flag=True, default=None, help="Write prompts into the log."),
    ]


def _decorated(command: Any, options: list[Decorator]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command


def _serve(context: click.Context, **options: Any) -> None:
    """Serve a policy behind an OpenAI-compatible API: candidates are drawn, scored, and the best comes back.

    Without arguments it serves a tiny demonstration, policy and reward model, on this machine; open the page
    it names. `rlhf-serve generate` does the same for a file of prompts.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if context.invoked_subcommand is not None:
        given = [name for name, value in options.items() if value is not None and value != ()]
        if given:
            click.echo(
                f"Error: give --{given[0].replace('_', '-')} after `{context.invoked_subcommand}`", err=True
            )
            sys.exit(2)
        return

    def job() -> None:
        from rlhf_serve.settings import ServeSettings

        settings = _settings(ServeSettings, options, lambda settings: "" if settings.model else _BUILDING)
        from rlhf_serve.cli.serve import serve

        serve(settings)

    exit_cleanly(job)


def _generate(**options: Any) -> None:
    """Best-of-N for a file of prompts; an interrupted run goes on where it was.

    Rows have `prompt`, a text or messages, and whatever else reward functions read. Each row comes back with
    `completion`, `score` and what it cost, in the order of the input.
    """

    def job() -> None:
        from rlhf_serve.settings import BatchSettings

        settings = _settings(BatchSettings, options)
        from rlhf_serve.cli.generate import generate

        generate(settings)

    exit_cleanly(job)


def _settings(kind: Any, options: dict[str, Any], more: Callable[[Any], str] = lambda settings: "") -> Any:
    """A command's settings, whose files and models are there; says that loading takes time."""
    from rlhf_serve.cli.display import Display
    from rlhf_serve.cli.options import check_inputs, settings_of

    settings = settings_of(kind, options)
    check_inputs(settings)
    Display().say(_LOADING + more(settings))
    return settings


def _generate_options() -> list[Decorator]:
    return [
        click.option("--input", "input_path", required=True, metavar="FILE", help="Rows with prompts."),
        click.option(
            "--output", "output_path", required=True, metavar="FILE", help="JSON lines, one per row."
        ),
        *_model_options(),
        click.option(
            "--top-k-candidates",
            "keep",
            type=click.IntRange(min=1),
            metavar="K",
            help="Write the best K candidates of each row too.",
        ),
        click.option(
            "--selection",
            type=click.Choice(("best", "majority", "weighted")),
            help="How the winner is chosen.",
        ),
        click.option(
            "--budget",
            type=click.IntRange(min=1),
            metavar="N",
            help="Samples per prompt on average, given where they pay, at most --n.",
        ),
        click.option(
            "--stop-early", is_flag=True, help="Stop sampling a prompt whose best will hardly be beaten."
        ),
        click.option("--max-tokens", type=click.IntRange(min=1), help="Longest completion.  [default: 256]"),
        click.option("--temperature", type=click.FloatRange(min=0), help="[default: 1]"),
        click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="[default: 1]"),
        click.option("--stop", multiple=True, metavar="TEXT", help="Ends a completion; repeatable."),
        click.option("--sampling-seed", type=click.IntRange(min=0), help="Of the samples.  [default: 0]"),
        click.option("--batch-size", type=click.IntRange(min=1), help="Prompts at a time.  [default: 16]"),
        click.option("--overwrite", is_flag=True, help="Start anew where the output exists."),
    ]


main = click.group(
    "rlhf-serve", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)(
    click.version_option(package_name="rlhf-serve")(
        _decorated(click.pass_context(_serve), [*_model_options(), *_server_options()])
    )
)
main.add_command(click.command("generate")(_decorated(_generate, _generate_options())))
