"""From the command line's options to settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rlhf_data import BaseConfig, apply_overrides, load_config_file
from rlhf_serve.settings import BatchSettings, ServeSettings

_Settings = TypeVar("_Settings", bound=BaseConfig)


def settings_of(options: Mapping[str, Any]) -> ServeSettings:
    """The settings of a server: the file's, then `--set`, then the options.

    Raises:
        UserError: a file or a value is wrong.
    """
    return _settings(ServeSettings, options)


def batch_settings_of(options: Mapping[str, Any]) -> BatchSettings:
    """The settings of `rlhf-serve generate`, likewise."""
    return _settings(BatchSettings, options)


def _settings(kind: type[_Settings], options: Mapping[str, Any]) -> _Settings:
    options = dict(options)
    path, overrides = options.pop("config"), options.pop("overrides")
    values = apply_overrides({} if path is None else load_config_file(path), overrides)
    values |= {key: value for key, value in options.items() if is_given(value)}
    return kind.from_dict(values, "settings" if path is None else f"config file {path}")


def is_given(value: Any) -> bool:
    """Whether an option was given on the command line."""
    return value is not None and value != () and value is not False
