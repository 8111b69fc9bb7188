"""Checks of what a pipeline's stages name, before anything runs: files, model folders, suites, merges."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_algos.pipeline import Stage, replaced
from rlhf_data import UserError
from rlhf_eval.capability import SUITES

_FILES = ("input", "prompts", "rows", "pairs", "measured", "start", "baseline", "file")
"""Settings that name files or folders of rows and reports; `file` of capability as NAME=FILE."""
_REPORTS = ("measured", "start", "baseline")
"""Of these, what is never on the hub."""
_MODELS = ("model", "base", "models", "reference", "candidate", "reward_model", "held_out_reward", "reward")
"""Settings that name models, some of them as a reward, which may also be a rule."""
_SUFFIXES = (".csv", ".gz", ".json", ".jsonl", ".parquet", ".tsv", ".txt", ".zst")
_MERGES = "rlhf_merge"


def check_stage(stage: Stage) -> None:
    """Refuse a stage that must fail as it names what is not there, or cannot be merged.

    References are passed over, as what they lead to may not be there yet, and so are names that may be on the
    hub: those with exactly one slash, and models without any.
    """
    for key in _FILES:
        for name in _plain(stage.config.get(key)):
            path = name.partition("=")[2] if key == "file" else name
            if path and _is_missing(path, files=True, on_hub=key not in _REPORTS):
                raise UserError(
                    f"stages.{stage.name}.config.{key}: {path} does not exist; check the path",
                    code="file_not_found",
                    **{"stage": stage.name, "key": key, "path": path},
                )
    for key in _MODELS:
        for name in _plain(stage.config.get(key)):
            if ":" not in name and all(_is_missing(each) for each in {name, name.partition("+")[0]}):
                raise UserError(
                    f"stages.{stage.name}.config.{key}: model folder {name} does not exist; check the path, "
                    "or give a name on the hub",
                    code="model_not_found",
                    **{"stage": stage.name, "key": key, "name": name},
                )
    if stage.kind == "capability":
        _check_suites(stage)
    if stage.kind == "merge":
        _check_merge(stage)


def _check_suites(stage: Stage) -> None:
    for name in _plain(stage.config.get("suite")):
        if "=" not in name and name not in SUITES:
            raise UserError(
                f"stages.{stage.name}.config.suite: unknown suite {name}; the built-in ones are "
                f"{', '.join(SUITES)}",
                code="unknown_suite",
                **{"stage": stage.name, "suite": name},
            )


def _check_merge(stage: Stage) -> None:
    """Refuse what rlhf-merge would, if that is installed."""
    if importlib.util.find_spec(_MERGES) is None:
        return
    merges = importlib.import_module(_MERGES)
    settings = replaced(stage.config, lambda reference: f"<{reference.stage}>")
    try:
        merges.MergeConfig.from_dict(settings, f"stages.{stage.name}.config")
    except merges.MergeError as error:
        raise UserError(str(error), code=error.code, **{**error.fields, "stage": stage.name}) from error


def _plain(value: Any) -> Iterator[str]:
    """Strings of a setting without references; for the models of a merge, their names."""
    for each in value if isinstance(value, list | tuple) else (value,):
        text = each.get("model") if isinstance(each, dict) else each
        if isinstance(text, str) and "${" not in text:
            yield text


def _is_missing(name: str, *, files: bool = False, on_hub: bool = True) -> bool:
    """Whether a name is that of a file or folder, rather than of something on the hub, and is not there."""
    if not name or os.path.exists(os.path.expanduser(name)):
        return False
    if name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1:
        return True
    return files and (not on_hub or "/" not in name or Path(name).suffix in _SUFFIXES)
