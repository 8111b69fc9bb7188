"""Metrics, training curves and pages for runs of every method."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULE_OF = {name: module for module, name in re.findall(r"^from rlhf_eval(\S*) import (\w+)", _STUB, re.M)}
"""Where each public name is defined; `__init__.pyi` lists them, for type checkers too."""

__all__ = sorted(_MODULE_OF)

_MOVED = ("minmax_figure", "write_minmax_report")
"""To rlhf_minmax; found here too in 0.x, if it is installed."""


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        return getattr(importlib.import_module("rlhf_minmax"), name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not (module := _MODULE_OF[name]):
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(__name__ + module), name)


def __dir__() -> list[str]:
    return __all__
