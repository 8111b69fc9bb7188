"""Merging of language models: streamed, resumable, checked; and the methods as pure functions on tensors."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "config.merge_config": ("MergeConfig",),
    "run.engine": ("Resources",),
    "errors": ("MergeError",),
    "methods.families.breadcrumbs": ("breadcrumbs",),
    "methods.families.dare": ("dare",),
    "methods.families.della": ("della",),
    "methods.families.linear": ("linear",),
    "methods.families.nearswap": ("nearswap",),
    "methods.families.spherical": ("model_stock", "slerp", "spherical_mean"),
    "methods.families.ties": ("task_arithmetic", "ties"),
    "run.merger": ("MergeResult", "ModelMerger", "layer_wise_interpolation"),
    "run.soup": ("ModelSoup", "SoupResult"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_merge' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_merge.{_MODULE_OF[name]}"), name)
