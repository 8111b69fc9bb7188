"""Checks of a job's models and files before torch is loaded, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_algos import check_reachable, require_ray
from rlhf_data import BaseConfig, UserError, model_folder
from rlhf_models import check_available, check_whole

_MODELS = ("model_name_or_path", "value_model_path", "reward_model", "model_name")
_DEEPSPEED = 'check the path, or write {"zero_optimization": {"stage": 2}} into it, which shards with ZeRO-2'
_ROWS = ("train_data", "eval_data", "sft_data", "preference_data", "prompt_data")


def check_inputs(config: BaseConfig, *, dry_run: bool = False) -> None:
    """Look for every model, file and folder that the settings name, and for the cluster of a run.

    Sections of the config are looked through too. Weights that are damaged are refused here as far as that
    shows without reading large files.
    """
    workers = getattr(config, "distributed", None)
    if workers is not None and not dry_run:
        require_ray(workers)
        check_reachable(workers)
    for key, name in _named(config):
        if key in _MODELS:
            check_available(name)
            check_whole(name)
        elif not os.path.exists(name) and not (key in _ROWS and _may_be_on_hub(name)):
            hint = _DEEPSPEED if key == "deepspeed" else "check the path"
            raise UserError(f"{key}: {name} does not exist; {hint}", code="file_not_found")
    for line in getattr(config, "reward", ()) if not isinstance(getattr(config, "reward", ()), dict) else ():
        if ":" not in line and ("/" in line or Path(line).is_dir()):
            check_available(line)
            check_whole(model_folder(line))


def check_planned(options: Mapping[str, Any]) -> None:
    """Refuse `--processes` and `--gpu` without `--dry-run`."""
    if not options["dry_run"] and (options["processes"] or options["gpu"]):
        raise UserError(
            "--processes and --gpu say what a dry run plans for; give --dry-run too, or start the training "
            "with torchrun",
            code="conflicting_options",
        )


def described(config: BaseConfig) -> str:
    """Model and rows in a few words."""
    values = config.to_dict()
    model = values.get("model_name_or_path") or values.get("model_config") or "a tiny model"
    rows = next((values[key] for key in _ROWS if values.get(key)), values.get("data"))
    return f"{model} on {rows or 'embedded rows'}"


def _named(config: BaseConfig) -> Iterator[tuple[str, str]]:
    """Keys and values of the models, files and folders that are named."""
    for key in config.path_keys():
        value = getattr(config, "scratch" if key == "model_config" else key)
        if value is not None:
            yield key, value
    for name in type(config).model_fields:
        value: Any = getattr(config, name)
        if isinstance(value, BaseConfig):
            yield from _named(value)


def _may_be_on_hub(name: str) -> bool:
    """Whether rows of this name may be a data set on the hub, `owner/name` and perhaps more after a colon."""
    owner, slash, rest = name.partition("/")
    return bool(owner and slash and rest) and not name.startswith((".", "~")) and rest.count("/") == 0
