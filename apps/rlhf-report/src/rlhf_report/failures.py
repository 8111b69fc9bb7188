"""Bad input as one sentence and exit code 2, for every command."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

__all__ = ["explained"]


def explained(run: Callable[..., Any]) -> Callable[..., Any]:
    """A command's function that ends with the sentence of a `UserError`, without a traceback."""

    @functools.wraps(run)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        from rlhf_data import UserError

        try:
            return run(*arguments, **options)
        except UserError as error:
            raise click.UsageError(str(error), ctx=None) from error

    return wrapped
