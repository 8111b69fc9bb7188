"""Loss functions: tensors and floats in, sums out.

Letters: `M` scored tokens of a packed batch (or steps of its solutions), `Q` sequences, `P` preference pairs.
There is no padding: tensors are flat vectors, those of tokens in any order.  Every loss is a **sum** over its
entries, and so is every scalar statistic returned with it; the caller divides once by the count of the
whole optimizer step (all micro-batches, all processes), which makes the gradient independent of how the step
was cut.  Log-probabilities of a sequence are sums over its tokens.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULE_OF = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.M)}
"""Where each public name is defined; `__init__.pyi` lists them, for type checkers too."""

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
