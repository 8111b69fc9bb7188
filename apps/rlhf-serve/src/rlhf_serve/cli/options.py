"""Settings from command-line options, checked as far as possible before torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from rlhf_data import (
    BaseConfig,
    SettingsSource,
    UserError,
    apply_overrides,
    load_config_file,
    overrides_given,
)
from rlhf_models.loading.sources import check_not_a_missing_path
from rlhf_serve.settings import RowsSettings

_Settings = TypeVar("_Settings", bound=BaseConfig)


def settings_of(kind: type[_Settings], options: Mapping[str, Any]) -> _Settings:
    """The settings of a command: the file's, then `--set`, then the options."""
    options = dict(options)
    path, overrides = options.pop("config"), options.pop("overrides")
    values = apply_overrides({} if path is None else load_config_file(path), overrides)
    # Options that were not given are None, empty or false.
    given = {key: value for key, value in options.items() if value not in (None, ()) and value is not False}
    for key, value in given.items():
        section, nested, name = key.partition("__")
        if not nested:
            values[key] = value
        elif isinstance(values.setdefault(section, {}), dict):
            values[section] = {**values[section], name: value}
    flags = tuple((key.replace("__", "."), _flag_of(key)) for key in given)
    name = "settings" if path is None else f"config file {path}"
    return kind.from_dict(values, SettingsSource(name, (*overrides_given(overrides), *flags)))


def _flag_of(name: str) -> str:
    """The flag of the running command whose value is the option of this name."""
    context = click.get_current_context(silent=True)
    params = context.command.params if context else ()
    return next((param.opts[0] for param in params if param.name == name), name)


def check_inputs(settings: BaseConfig) -> None:
    """Look for the models and files that the settings name by a path."""
    if isinstance(settings, RowsSettings):
        rows, output = Path(settings.input_path), Path(settings.output_path)
        if not rows.exists():
            raise UserError(f"data file {rows} does not exist; check the path", code="file_not_found")
        if output.exists() and output.samefile(rows):
            raise UserError(
                f"--output {output} is the input, which would be lost; name another file",
                code="conflicting_options",
            )
    models = (getattr(settings, name, None) for name in ("model", "draft_model", "critic"))
    for name in (*models, *getattr(settings, "reward", ())):
        if name is not None and ":" not in name:
            check_not_a_missing_path(name)
