"""MinMax RLHF: a policy and a monitor trained against each other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_minmax.config import MinMaxConfig as MinMaxConfig
    from rlhf_minmax.demo import demo_models as demo_models
    from rlhf_minmax.duals import DualSettings as DualSettings
    from rlhf_minmax.duals import DualState as DualState
    from rlhf_minmax.duals import update_multiplier as update_multiplier
    from rlhf_minmax.events import Events as Events
    from rlhf_minmax.job import MinMaxJob as MinMaxJob
    from rlhf_minmax.monitor_model import MonitorModel as MonitorModel
    from rlhf_minmax.optimizer import DualPPOOptimizer as DualPPOOptimizer
    from rlhf_minmax.pipeline import MinMaxOutput as MinMaxOutput
    from rlhf_minmax.pipeline import MinMaxPipeline as MinMaxPipeline
    from rlhf_minmax.texts import Critique as Critique
    from rlhf_minmax.texts import parse_critique as parse_critique
    from rlhf_minmax.trainer import MinMaxTrainer as MinMaxTrainer

_MODULES = {
    "config": ("MinMaxConfig",),
    "demo": ("demo_models",),
    "duals": ("DualSettings", "DualState", "update_multiplier"),
    "events": ("Events",),
    "job": ("MinMaxJob",),
    "monitor_model": ("MonitorModel",),
    "optimizer": ("DualPPOOptimizer",),
    "pipeline": ("MinMaxOutput", "MinMaxPipeline"),
    "texts": ("Critique", "parse_critique"),
    "trainer": ("MinMaxTrainer",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
