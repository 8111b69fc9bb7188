"""The command `rlhf-serve`: parses, calls, prints."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from rlhf_data import exit_cleanly, output_written

_BACKENDS = ("auto", "transformers", "vllm")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_ANSWERS = ("text", "marked", "number")
_SEARCHES = ("mcts", "beam", "dvts", "best-first", "best-of-n", "ab-mcts")
_COMPRESSIONS = ("question", "surprisal", "contrastive")
_LOADING = "loading torch and transformers, which takes some seconds"
_BUILDING = "; a demonstration of another seed is built first, which takes minutes"

Decorator = Callable[[Any], Any]


def _model_options(*, several: bool = True) -> list[Decorator]:
    """Options of all commands about models; defaults are those of `rlhf_serve.settings`."""
    candidates = [
        click.option("--n", type=click.IntRange(min=1), help="Candidates per prompt.  [default: 8]"),
        click.option("--answer", type=click.Choice(_ANSWERS), help="What votes count.  [default: text]"),
    ]
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
            help="Reward of candidates: a reward model, an ensemble or a process reward model, "
            "pkg.mod:function, a URL, or a rule; repeatable.",
        ),
        *(candidates if several else ()),
        click.option(
            "--draft-model", metavar="PATH|HUB_ID", help="Small model that guesses tokens ahead, for speed."
        ),
        click.option(
            "--draft",
            type=click.Choice(("ngram", "layers")),
            help="Guess tokens from repetitions, or by the model's first layers, for speed.",
        ),
        click.option("--backend", type=click.Choice(_BACKENDS), help="Generation engine.  [default: auto]"),
        click.option(
            "--dtype",
            type=click.Choice(_DTYPES),
            help="Dtype of the weights.  [default: as stored; with vLLM half precision for float32]",
        ),
        click.option("--device", metavar="DEVICE", help="Device of the models.  [default: the GPU, if any]"),
        click.option("--chat-template", metavar="FILE", help="Chat template for a tokenizer without one."),
        click.option("--seed", type=click.IntRange(min=0), help="Seed of the demonstration.  [default: 0]"),
    ]


def _server_options() -> list[Decorator]:
    return [
        click.option("--served-model-name", metavar="NAME", help="Model name for clients."),
        click.option(
            "--host", metavar="ADDRESS", help="Address to listen on.  [default: 127.0.0.1, this machine only]"
        ),
        click.option(
            "--port", type=click.IntRange(0, 65535), help="Port; 0 for a free one.  [default: 8000]"
        ),
        click.option(
            "--api-keys-file", metavar="FILE", help="File of API keys, one per line: `name key` or `key`."
        ),
        click.option(
            "--requests-per-minute", type=click.FloatRange(min=0, min_open=True), help="Limit for each key."
        ),
        click.option("--max-concurrent-per-key", type=click.IntRange(min=1), help="Limit for each key."),
        click.option("--max-n", type=click.IntRange(min=1), help="Maximum number of candidates per request."),
        click.option("--max-tokens", type=click.IntRange(min=1), help="Maximum completion length in tokens."),
        click.option("--max-waiting", type=click.IntRange(min=0), help="Maximum length of the queue."),
        click.option(
            "--cors-origin",
            "cors_origins",
            multiple=True,
            metavar="ORIGIN",
            help="Web pages of this origin may use the server; * for all; repeatable.",
        ),
        click.option("--log-prompts", is_flag=True, default=None, help="Log prompts."),
        click.option(
            "--feedback",
            metavar="FILE",
            help="Take ratings of answers, and append them as rows for rlhf-train kto.",
        ),
    ]


def _decorated(command: Any, options: list[Decorator]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command


def _serve(context: click.Context, **options: Any) -> None:
    """Serve a policy with an OpenAI-compatible API: candidates are sampled and scored, the best is returned.

    Without arguments it serves a tiny demonstration, policy and reward model, on this machine; open the page
    at the address it prints. `rlhf-serve generate` does the same for a file of prompts.
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

        settings = _settings(
            ServeSettings, options, lambda settings: _BUILDING if settings.seed and not settings.model else ""
        )
        from rlhf_serve.cli.listener import bound

        with contextlib.closing(bound(settings)) as listener:
            from rlhf_serve.cli.serve import serve

            serve(settings, listener)

    exit_cleanly(job)


def _generate(**options: Any) -> None:
    """Best-of-N or tree search for a file of prompts; an interrupted run continues where it stopped.

    Rows have `prompt`, a text or messages, and any columns that reward functions read. The output has each
    row with `completion`, `score` and its cost, in the order of the input.
    """
    exit_cleanly(lambda: _run("generate", "BatchSettings", options))


def _label_steps(**options: Any) -> None:
    """Label steps by Monte Carlo, for `rlhf-train prm`: how often completions from a step on are right.

    Rows have `prompt` and what the reward reads, such as `answer` for `--reward number`. The output has rows
    with `prompt`, `completions` (steps) and `labels`. An interrupted run continues where it stopped.
    """
    exit_cleanly(lambda: _run("label_steps", "LabelSettings", options))


def _refine(**options: Any) -> None:
    """Draft, critique and rewrite for a file of prompts; an interrupted run continues where it stopped.

    The policy criticises its own drafts, or --critic does. With --principles a round's critiques are about
    one of them. The output has each row with `completion` (the draft that is kept), `score`, `first_draft`,
    `drafts` with their critiques, and the cost, in the order of the input.
    """
    exit_cleanly(lambda: _run("refine", "RefineSettings", options))


def _compress(**options: Any) -> None:
    """Shorten a text in every row to an exact number of its own tokens; an interrupted run continues.

    A language model says which sentences matter to the question in another column. The output has each row
    with the shorter text and, in `compression`, its tokens before and after.
    """
    exit_cleanly(lambda: _run("compress", "CompressSettings", options))


def _run(command: str, kind: str, options: dict[str, Any]) -> None:
    """Run a command over a file; its module, which loads torch, once its settings are known to be right."""
    settings = _settings(getattr(import_module("rlhf_serve.settings"), kind), options)
    getattr(import_module(f"rlhf_serve.cli.{command}"), command)(settings)


def _settings(kind: Any, options: dict[str, Any], more: Callable[[Any], str] = lambda settings: "") -> Any:
    """A command's settings, whose files and models are there; says that loading takes time."""
    from rlhf_serve.cli.display import Display
    from rlhf_serve.cli.options import check_inputs, settings_of

    settings = settings_of(kind, options)
    check_inputs(settings)
    Display().say(_LOADING + more(settings))
    return settings


def _file_options(*, several: bool = True) -> list[Decorator]:
    """Options of the commands over a file of prompts."""
    return [
        click.option("--input", "input_path", required=True, metavar="FILE", help="Rows with prompts."),
        click.option("--output", "output_path", required=True, metavar="FILE", help="JSON lines."),
        *_model_options(several=several),
        click.option(
            "--max-tokens",
            type=click.IntRange(min=1),
            help="Maximum completion length in tokens.  [default: 256]",
        ),
        click.option("--temperature", type=click.FloatRange(min=0), help="[default: 1]"),
        click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="[default: 1]"),
        click.option(
            "--stop", multiple=True, metavar="TEXT", help="Text that ends a completion; repeatable."
        ),
        click.option(
            "--sampling-seed", type=click.IntRange(min=0), help="Seed of the samples.  [default: 0]"
        ),
        click.option("--batch-size", type=click.IntRange(min=1), help="Prompts per batch.  [default: 16]"),
        click.option(
            "--overwrite", is_flag=True, help="Replace an existing output instead of continuing it."
        ),
    ]


def _generate_options() -> list[Decorator]:
    return [
        *_file_options(),
        click.option(
            "--top-k-candidates",
            "keep",
            type=click.IntRange(min=1),
            metavar="K",
            help="Also write the best K candidates of each row.",
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
            help="Mean samples per prompt, allocated by expected gain, at most --n each.",
        ),
        click.option(
            "--stop-early",
            is_flag=True,
            help="Stop sampling a prompt once its best is unlikely to be beaten.",
        ),
        click.option(
            "--search",
            "search__strategy",
            type=click.Choice(_SEARCHES),
            help="Search step by step, guided by the reward model.",
        ),
        click.option(
            "--search-width",
            "search__width",
            type=click.IntRange(min=1),
            metavar="N",
            help="Steps drawn of a prompt at a time.  [default: 8]",
        ),
        click.option(
            "--search-budget-tokens",
            "search__budget_tokens",
            type=click.IntRange(min=1),
            metavar="N",
            help="Tokens generated for a prompt at most.  [default: 2048]",
        ),
        click.option("--search-tree", metavar="FILE", help="Also write everything that was drawn."),
    ]


def _label_options() -> list[Decorator]:
    return [
        *_file_options(),
        click.option(
            "--solutions",
            "labels__solutions",
            type=click.IntRange(min=1),
            metavar="N",
            help="Solutions per prompt, each a row.  [default: 4]",
        ),
        click.option(
            "--completions",
            "labels__completions",
            type=click.IntRange(min=1),
            metavar="N",
            help="Completions drawn after each step.  [default: 8]",
        ),
        click.option(
            "--estimation",
            "labels__estimation",
            type=click.Choice(("hard", "soft")),
            help="1 if any completion is right, or the share that is.  [default: hard]",
        ),
    ]


def _refine_options() -> list[Decorator]:
    return [
        *_file_options(several=False),
        click.option("--critic", metavar="PATH|HUB_ID", help="Model that criticises.  [default: the policy]"),
        click.option("--critic-max-tokens", type=click.IntRange(min=1), help="[default: --max-tokens]"),
        click.option("--principles", metavar="FILE", help="Principles that critiques are about, in turn."),
        click.option("--rounds", type=click.IntRange(min=0), help="Rewrites at most.  [default: 3]"),
        click.option(
            "--until",
            type=click.Choice(("score", "no_change", "verdict", "never")),
            help="What ends rounds earlier: no better score, no change, a critique that finds nothing.",
        ),
        click.option(
            "--keep", type=click.Choice(("best", "last")), help="Draft that is kept.  [default: best]"
        ),
        click.option(
            "--min-gain", type=click.FloatRange(min=0), help="Gain in score that counts.  [default: 0]"
        ),
    ]


def _compress_options() -> list[Decorator]:
    return [
        click.option("--input", "input_path", required=True, metavar="FILE", help="Rows with texts."),
        click.option("--output", "output_path", required=True, metavar="FILE", help="JSON lines."),
        click.option("--config", type=click.Path(), help="JSON or YAML file of settings."),
        click.option(
            "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one setting; repeatable."
        ),
        click.option("--model", metavar="PATH|HUB_ID", help="Language model that scores."),
        click.option("--text-key", metavar="COLUMN", help="Column of the text.  [default: prompt]"),
        click.option("--question-key", metavar="COLUMN", help="Column of what is asked of it."),
        click.option("--method", type=click.Choice(_COMPRESSIONS), help="[default: question]"),
        click.option(
            "--ratio",
            type=click.FloatRange(min=1),
            help="Compression ratio: 4 keeps a quarter of the tokens.",
        ),
        click.option("--max-tokens", type=click.IntRange(min=1), help="Token budget of each text."),
        click.option("--keep-first", type=click.IntRange(min=0), metavar="N", help="Keep the first tokens."),
        click.option("--keep-last", type=click.IntRange(min=0), metavar="N", help="Keep the last tokens."),
        click.option("--protect", multiple=True, metavar="TEXT", help="Keep this text; repeatable."),
        click.option("--units", type=click.Choice(("sentence", "token")), help="[default: sentence]"),
        click.option("--dtype", type=click.Choice(_DTYPES), help="[default: as stored]"),
        click.option("--device", metavar="DEVICE", help="[default: the GPU, if any]"),
        click.option("--batch-size", type=click.IntRange(min=1), help="Rows at a time.  [default: 16]"),
        click.option(
            "--overwrite", is_flag=True, help="Replace an existing output instead of continuing it."
        ),
    ]


class _Commands(click.Group):
    """The commands."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; output that cannot be written ends it with a sentence."""
        with output_written():
            return super().main(*args, **extra)


main = click.group(
    "rlhf-serve",
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)(
    click.version_option(package_name="rlhf-serve")(
        _decorated(click.pass_context(_serve), [*_model_options(), *_server_options()])
    )
)
main.add_command(click.command("generate")(_decorated(_generate, _generate_options())))
main.add_command(click.command("label-steps")(_decorated(_label_steps, _label_options())))
main.add_command(click.command("refine")(_decorated(_refine, _refine_options())))
main.add_command(click.command("compress")(_decorated(_compress, _compress_options())))
