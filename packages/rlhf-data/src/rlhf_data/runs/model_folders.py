"""Where the model with a given name is: for a run's folder, in its `final/`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rlhf_data.errors import UserError

_MODEL_FILES = ("config.json", "adapter_config.json", "ensemble_config.json")


def model_folder(name: str) -> str:
    """The folder of the model with a given name: `final` of a run's folder; any other name is returned.

    Raises:
        UserError: it is the folder of a run that has no model yet, or several.
    """
    folder = Path(name)
    if not _is_run(folder):
        return name
    final = folder / "final"
    if _holds_model(final):
        return str(final)
    models = [path for path in (*final.glob("*"), *folder.glob("*/final")) if _holds_model(path)]
    if models:
        several = ", ".join(str(path) for path in sorted(models))
        raise UserError(
            f"{name} is a run with several models; name one of them: {several}", code="several_models"
        )
    raise UserError(
        f"{name} is a run that has no trained model yet; finish it with --resume {name}, or name one of its "
        "checkpoints",
        code="no_trained_model",
    )


def model_name(folder: str | Path) -> str:
    """The name of a model by its folder: of `final` in a run's folder that of the run."""
    path = Path(folder)
    return (path.parent.name if path.name == "final" else path.name) or str(folder)


def _holds_model(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in _MODEL_FILES)  # also of names that are too long


def _is_run(folder: Path) -> bool:
    """Whether it is a run's folder, whose config.json names no kind of model."""
    if any(os.path.isfile(folder / name) for name in _MODEL_FILES[1:]):
        return False
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return _holds_model(folder / "final")
    if not isinstance(config, dict) or "model_type" in config:
        return False
    return (folder / "final").is_dir() or "method" in config
