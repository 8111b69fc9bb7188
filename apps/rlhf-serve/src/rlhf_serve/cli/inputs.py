"""What can be said of paths before torch is loaded, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from rlhf_data import UserError
from rlhf_models.loading.sources import check_not_a_missing_path
from rlhf_serve.settings import BatchSettings, ModelSettings


def check_inputs(settings: ModelSettings) -> None:
    """Look for the models and files that the settings name by a path.

    Raises:
        UserError: one is not there.
    """
    if isinstance(settings, BatchSettings) and not Path(settings.input_path).exists():
        raise UserError(f"data file {settings.input_path} does not exist; check the path")
    for name in (settings.model, *settings.reward):
        if name is not None and ":" not in name:
            check_not_a_missing_path(name)
