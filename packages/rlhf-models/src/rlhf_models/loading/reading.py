"""Reading with transformers: from a folder, the local cache or the hub, quietly, with errors of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from rlhf_data import UserError, absolute_path, is_out_of_memory
from rlhf_models.loading.sources import check_on_hub


def cached_first(load: Callable[..., Any], name_or_path: str | Path, **options: Any) -> Any:
    """Load from the folder or the local cache; where that fails, and only then, a hub name asks the hub.

    A model from a folder is named by its absolute path, which adapters on it write down.
    """
    place = absolute_path(str(name_or_path))
    options["trust_remote_code"] = False  # else transformers asks on the terminal whether to run it
    try:
        with quiet_transformers(bars=False):
            return load(place, local_files_only=True, **options)
    except Exception as error:
        pass_on(error)
        _refuse_remote_code(place, error)
        if Path(name_or_path).is_dir():
            raise
    check_on_hub(place)
    try:
        with quiet_transformers(bars=True):
            return load(place, **options)
    except ValueError as error:
        _refuse_remote_code(place, error)
        raise


def pass_on(error: Exception) -> None:
    """Raise an error again that is not about a model's files, of which transformers raises any other kind."""
    if isinstance(error, UserError) or is_out_of_memory(error):
        raise error


def _refuse_remote_code(name: str, error: BaseException) -> None:
    """Say that a model needs code of its own, where that is what an error of transformers is about."""
    if isinstance(error, ValueError) and "trust_remote_code" in str(error):
        raise UserError(
            f"model {name} needs Python code that comes with it, which is never run; name a model of an "
            "architecture that transformers has",
            code="remote_code",
            name=name,
        ) from error


@contextlib.contextmanager
def quiet_transformers(*, bars: bool) -> Iterator[None]:
    """Hold back transformers' loading report (`read_model` checks what it says), and bars unless wanted."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without a full stop; its kind where it has no text."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
