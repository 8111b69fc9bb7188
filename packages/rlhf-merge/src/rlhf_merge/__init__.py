"""Merging of language models: streamed, resumable, checked; and the methods as pure functions on tensors."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULE_OF = {name: module for module, name in re.findall(r"^from rlhf_merge(\S*) import (\w+)", _STUB, re.M)}
"""Where each public name is defined; `__init__.pyi` lists them, for type checkers too."""

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(__name__ + _MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
