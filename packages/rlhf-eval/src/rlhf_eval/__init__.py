"""Metrics, training curves and pages for runs of every method."""

from __future__ import annotations

import importlib
from typing import Any

from rlhf_data import lazy_names

__all__, _public, __dir__ = lazy_names(__name__, __file__)

_MOVED = ("minmax_figure", "write_minmax_report")
"""To rlhf_minmax; found here too in 0.x, if it is installed."""


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("rlhf_minmax"), name) if name in _MOVED else _public(name)
