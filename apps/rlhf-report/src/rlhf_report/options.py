"""Shared by several commands: options, a progress bar, and how bad input ends them (exit code 2)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from rlhf_data import RunFolder, UserError, alone_in, exit_cleanly, model_folder


def bad_row_option(meaning: str) -> Any:
    """The option `--on-bad-row`: error or skip."""
    return click.option(
        "--on-bad-row",
        default="error",
        show_default=True,
        type=click.Choice(["error", "skip"]),
        help=meaning,
    )


def report_dir_option(job: str) -> Any:
    """The option `--output-dir` of a report that is a new folder."""
    return click.option(
        "--output-dir", metavar="DIR", help=f"Folder of the report.  [default: outputs/{job}-<time>]"
    )


def dtype_option(whose: str = "the model's") -> Any:
    """The option `--dtype`."""
    return click.option("--dtype", default="auto", show_default=True, help=f"Dtype of {whose} weights.")


_EXTRA_WITH = {"rlhf_models": "models", "rlhf_infer": "models", "torch": "models", "rlhf_minmax": "minmax"}
"""The extra that brings a package."""


def explained(run: Callable[..., None]) -> Callable[..., None]:
    """A command's function that ends with the sentence of a `UserError`, without a traceback.

    So does one that needs a package which only an extra brings.
    """

    def job(*arguments: Any, **options: Any) -> None:
        try:
            run(*arguments, **options)
        except ModuleNotFoundError as error:
            extra = _EXTRA_WITH.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            raise UserError(
                f'this needs more than is installed ({error}); run pip install "rlhf-report[{extra}]"',
                code="missing_package",
            ) from error

    @functools.wraps(run)
    def wrapped(*arguments: Any, **options: Any) -> None:
        exit_cleanly(functools.partial(job, *arguments, **options))

    return wrapped


def check_policy(model: str) -> None:
    """Refuse a folder without a language model or its weights, an adapter's base included, before loading it.

    Raises:
        UserError: it is not a language model, or weights are missing.
    """
    from rlhf_models import adapter_base, check_language_model, check_weights, is_adapter

    base = adapter_base(model) if is_adapter(model) else model
    check_language_model(base)
    check_weights(base)


def max_new_tokens_option(default: int, what: str) -> Any:
    """The option `--max-new-tokens`."""
    return click.option(
        "--max-new-tokens",
        default=default,
        show_default=True,
        type=click.IntRange(1),
        help=f"Maximum length of {what}.",
    )


@contextmanager
def new_run(path: str | None, job: str) -> Iterator[RunFolder]:
    """A new run folder that no other process writes to; gone again if a mistake left it empty.

    Raises:
        UserError: it cannot be made, or holds something already.
    """
    run = RunFolder.create(path or None, job=job, resumable=False)
    try:
        with alone_in(run.path):
            yield run
    except UserError:
        with suppress(OSError):
            run.path.rmdir()
        raise


def split_name(entry: str) -> tuple[str | None, str]:
    """Name and path of `NAME=PATH`; the name is None if there is none."""
    name, equals, path = entry.partition("=")
    if not equals or Path(entry).exists():
        return None, entry
    if not (name and path):
        raise UserError(f"{entry}: name or path is empty; expected NAME=PATH", code="invalid_option")
    return name, path


def named_columns(given: Sequence[str], known: Sequence[str] = ()) -> dict[str, str]:
    """Columns of the files by their usual names, from `--columns NAME=COLUMN`.

    Without `known` ones the check is left to what reads the rows.

    Raises:
        UserError: a value is malformed, has an unknown name, or repeats one.
    """
    found: dict[str, str] = {}
    for entry in given:
        name, equals, column = entry.partition("=")
        if not (name and equals and column) or (known and name not in known):
            among = f" with one of {', '.join(known)}" if known else ""
            raise UserError(
                f"--columns {entry}: expected NAME=COLUMN{among}, such as chosen=better",
                code="unknown_column" if name and equals and column else "invalid_option",
                column=name,
            )
        if column.startswith("["):
            raise UserError(
                f"--columns {entry}: expected one column; a training's setting columns can join several",
                code="unknown_column",
                column=name,
            )
        if name in found:
            raise UserError(
                f"--columns names {name} twice, {found[name]} and {column}; leave one out",
                code="repeated_name",
                name=name,
            )
        found[name] = column
    return found


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal; its value is called with the number of what has been done."""
    if not total:
        yield lambda count: None
        return
    with click.progressbar(length=total, label=what, file=sys.stderr) as bar:
        yield bar.update


def tokenizer_of(name: str) -> Any:
    """The tokenizer of `--tokenizer`, a model or a run."""
    from rlhf_models import load_tokenizer

    return load_tokenizer(model_folder(name))
