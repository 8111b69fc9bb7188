"""The command `rlhf-serve`: parses, calls, prints."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
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


def _option(names: str, help: str, **more: Any) -> click.Option:
    """An option with its names, the last of which may be that of a setting."""
    return click.Option(names.split(), help=help, **more)


def _count(names: str, help: str, least: int = 1, **more: Any) -> click.Option:
    return _option(names, help, type=click.IntRange(min=least), **more)


def _choice(names: str, help: str, of: Sequence[str]) -> click.Option:
    return _option(names, help, type=click.Choice(of))


def _settings_options() -> list[click.Parameter]:
    """Options of all commands."""
    return [
        _option("--config", "JSON or YAML file of settings.", type=click.Path()),
        _option("--set overrides", "Override one setting; repeatable.", multiple=True, metavar="KEY=VALUE"),
    ]


def _rows_options(rows: str) -> list[click.Parameter]:
    """Options of the commands over a file."""
    return [
        _option("--input input_path", f"Rows with {rows}.", required=True, metavar="FILE"),
        _option("--output output_path", "JSON lines.", required=True, metavar="FILE"),
    ]


def _overwrite() -> click.Option:
    return _option("--overwrite", "Replace an existing output instead of continuing it.", is_flag=True)


def _model_options(*, several: bool = True) -> list[click.Parameter]:
    """Options of all commands about models; defaults are those of `rlhf_serve.settings`."""
    candidates = [
        _count("--n", "Candidates per prompt.  [default: 8]"),
        _choice("--answer", "What votes count.  [default: text]", _ANSWERS),
    ]
    return [
        *_settings_options(),
        _option("--model", "Policy.  [default: a tiny demonstration]", metavar="PATH|HUB_ID"),
        _option(
            "--reward-model --reward reward",
            "Reward of candidates: a reward model, an ensemble or a process reward model, "
            "pkg.mod:function, a URL, or a rule; repeatable.",
            multiple=True,
            metavar="SOURCE",
        ),
        *(candidates if several else ()),
        _option("--draft-model", "Small model that guesses tokens ahead, for speed.", metavar="PATH|HUB_ID"),
        _choice(
            "--draft",
            "Guess tokens from repetitions, or by the model's first layers, for speed.",
            ("ngram", "layers"),
        ),
        _choice("--backend", "Generation engine.  [default: auto]", _BACKENDS),
        _choice(
            "--dtype",
            "Dtype of the weights.  [default: as stored; with vLLM half precision for float32]",
            _DTYPES,
        ),
        _option("--device", "Device of the models.  [default: the GPU, if any]", metavar="DEVICE"),
        _option("--chat-template", "Chat template for a tokenizer without one.", metavar="FILE"),
        _count("--seed", "Seed of the demonstration.  [default: 0]", 0),
    ]


def _server_options() -> list[click.Parameter]:
    above_0 = click.FloatRange(min=0, min_open=True)
    return [
        _option("--served-model-name", "Model name for clients.", metavar="NAME"),
        _option(
            "--host", "Address to listen on.  [default: 127.0.0.1, this machine only]", metavar="ADDRESS"
        ),
        _option("--port", "Port; 0 for a free one.  [default: 8000]", type=click.IntRange(0, 65535)),
        _option("--api-keys-file", "File of API keys, one per line: `name key` or `key`.", metavar="FILE"),
        _option("--requests-per-minute", "Limit for each key.", type=above_0),
        _count("--max-concurrent-per-key", "Limit for each key."),
        _count("--max-n", "Maximum number of candidates per request."),
        _count("--max-tokens", "Maximum completion length in tokens."),
        _count("--max-waiting", "Maximum length of the queue.", 0),
        _option(
            "--cors-origin cors_origins",
            "Web pages of this origin may use the server; * for all; repeatable.",
            multiple=True,
            metavar="ORIGIN",
        ),
        _option("--log-prompts", "Log prompts.", is_flag=True, default=None),
        _option(
            "--feedback",
            "Take ratings of answers, and append them as rows for rlhf-train kto.",
            metavar="FILE",
        ),
    ]


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


def _file_options(*, several: bool = True) -> list[click.Parameter]:
    """Options of the commands over a file of prompts."""
    return [
        *_rows_options("prompts"),
        *_model_options(several=several),
        _count("--max-tokens", "Maximum completion length in tokens.  [default: 256]"),
        _option("--temperature", "[default: 1]", type=click.FloatRange(min=0)),
        _option("--top-p", "[default: 1]", type=click.FloatRange(0, 1, min_open=True)),
        _option("--stop", "Text that ends a completion; repeatable.", multiple=True, metavar="TEXT"),
        _count("--sampling-seed", "Seed of the samples.  [default: 0]", 0),
        _count("--batch-size", "Prompts per batch.  [default: 16]"),
        _overwrite(),
    ]


def _generate_options() -> list[click.Parameter]:
    return [
        *_file_options(),
        _count("--top-k-candidates keep", "Also write the best K candidates of each row.", metavar="K"),
        _choice("--selection", "How the winner is chosen.", ("best", "majority", "weighted")),
        _count(
            "--budget",
            "Mean samples per prompt, allocated by expected gain, at most --n each.",
            metavar="N",
        ),
        _option(
            "--stop-early", "Stop sampling a prompt once its best is unlikely to be beaten.", is_flag=True
        ),
        _choice("--search search__strategy", "Search step by step, guided by the reward model.", _SEARCHES),
        _count(
            "--search-width search__width",
            "Steps drawn of a prompt at a time.  [default: 8]",
            metavar="N",
        ),
        _count(
            "--search-budget-tokens search__budget_tokens",
            "Tokens generated for a prompt at most.  [default: 2048]",
            metavar="N",
        ),
        _option("--search-tree", "Also write everything that was drawn.", metavar="FILE"),
    ]


def _label_options() -> list[click.Parameter]:
    return [
        *_file_options(several=False),
        _count(
            "--solutions labels__solutions",
            "Solutions per prompt, each a row.  [default: 4]",
            metavar="N",
        ),
        _count(
            "--completions labels__completions",
            "Completions drawn after each step.  [default: 8]",
            metavar="N",
        ),
        _choice(
            "--estimation labels__estimation",
            "1 if any completion is right, or the share that is.  [default: hard]",
            ("hard", "soft"),
        ),
        _option(
            "--separator labels__separator",
            "Text that ends a step.  [default: a line break]",
            metavar="TEXT",
        ),
    ]


def _refine_options() -> list[click.Parameter]:
    return [
        *_file_options(several=False),
        _option("--critic", "Model that criticises.  [default: the policy]", metavar="PATH|HUB_ID"),
        _count("--critic-max-tokens", "[default: --max-tokens]"),
        _option("--principles", "Principles that critiques are about, in turn.", metavar="FILE"),
        _count("--rounds", "Rewrites at most.  [default: 3]", 0),
        _choice(
            "--until",
            "What ends rounds earlier: no better score, no change, a critique that finds nothing.",
            ("score", "no_change", "verdict", "never"),
        ),
        _choice("--keep", "Draft that is kept.  [default: best]", ("best", "last")),
        _option("--min-gain", "Gain in score that counts.  [default: 0]", type=click.FloatRange(min=0)),
    ]


def _compress_options() -> list[click.Parameter]:
    return [
        *_rows_options("texts"),
        *_settings_options(),
        _option("--model", "Language model that scores.", metavar="PATH|HUB_ID"),
        _option("--text-key", "Column of the text.  [default: prompt]", metavar="COLUMN"),
        _option("--question-key", "Column of what is asked of it.", metavar="COLUMN"),
        _choice("--method", "[default: question]", _COMPRESSIONS),
        _option(
            "--ratio", "Compression ratio: 4 keeps a quarter of the tokens.", type=click.FloatRange(min=1)
        ),
        _count("--max-tokens", "Token budget of each text."),
        _count("--keep-first", "Keep the first tokens.", 0, metavar="N"),
        _count("--keep-last", "Keep the last tokens.", 0, metavar="N"),
        _option("--protect", "Keep this text; repeatable.", multiple=True, metavar="TEXT"),
        _choice("--units", "[default: sentence]", ("sentence", "token")),
        _choice("--dtype", "[default: as stored]", _DTYPES),
        _option("--device", "[default: the GPU, if any]", metavar="DEVICE"),
        _count("--batch-size", "Rows at a time.  [default: 16]"),
        _overwrite(),
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
)(click.version_option(package_name="rlhf-serve")(click.pass_context(_serve)))
main.params += [*_model_options(), *_server_options()]
main.add_command(click.command("generate", params=_generate_options())(_generate))
main.add_command(click.command("label-steps", params=_label_options())(_label_steps))
main.add_command(click.command("refine", params=_refine_options())(_refine))
main.add_command(click.command("compress", params=_compress_options())(_compress))
