"""What a model's files hold, against what the model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_data import UserError
from rlhf_models.loading.reading import cached_first


def wrong_shape(auto_class: Any, name_or_path: str | Path, where: str, config: Any) -> UserError:
    """The error of a model of whose tensors one has another shape in the files; every process can make it."""
    options: dict[str, Any] = {"config": config, "adapter_kwargs": {"local_files_only": True}}
    _, info = cached_first(
        auto_class.from_pretrained,
        name_or_path,
        device_map={"": "meta"},
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    wrong = sorted((name, list(stored), list(own)) for name, stored, own in info["mismatched_keys"])
    name, stored, own = wrong[0] if wrong else (None, None, None)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    what = "its weights have other shapes than the model of its config.json"
    if wrong:
        what = f"its tensor {name} has shape {stored}, and the model of its config.json has {own} there{more}"
    return UserError(
        f"{where} cannot be loaded: {what}; check that weights and config belong together",
        code="unreadable_weights",
        tensor=name,
        stored=stored,
        expected=own,
    )
