"""Bad input as one sentence and exit code 2, for every command."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rlhf_data import exit_cleanly


def explained(run: Callable[..., None]) -> Callable[..., None]:
    """A command's function that ends with the sentence of a `UserError`, without a traceback."""

    @functools.wraps(run)
    def wrapped(*arguments: Any, **options: Any) -> None:
        exit_cleanly(functools.partial(run, *arguments, **options))

    return wrapped
