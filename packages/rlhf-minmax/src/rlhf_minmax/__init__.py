"""MinMax RLHF: a policy and a monitor trained against each other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_minmax.config.run import MinMaxConfig as MinMaxConfig
    from rlhf_minmax.demo.builder import demo_models as demo_models
    from rlhf_minmax.dual_ascent import DualSettings as DualSettings
    from rlhf_minmax.dual_ascent import DualState as DualState
    from rlhf_minmax.dual_ascent import update_multiplier as update_multiplier
    from rlhf_minmax.formats import Critique as Critique
    from rlhf_minmax.formats import parse_critique as parse_critique
    from rlhf_minmax.game.forward_pass import MinMaxOutput as MinMaxOutput
    from rlhf_minmax.game.forward_pass import MinMaxPipeline as MinMaxPipeline
    from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer as DualPPOOptimizer
    from rlhf_minmax.players.monitor_model import MonitorModel as MonitorModel
    from rlhf_minmax.report.page import write_minmax_report as write_minmax_report
    from rlhf_minmax.report.panels import minmax_figure as minmax_figure
    from rlhf_minmax.run.events import Events as Events
    from rlhf_minmax.run.minmax_job import MinMaxJob as MinMaxJob
    from rlhf_minmax.run.trainer import MinMaxTrainer as MinMaxTrainer

_MODULES = {
    "config.run": ("MinMaxConfig",),
    "demo.builder": ("demo_models",),
    "dual_ascent": ("DualSettings", "DualState", "update_multiplier"),
    "run.events": ("Events",),
    "run.minmax_job": ("MinMaxJob",),
    "players.monitor_model": ("MonitorModel",),
    "optim.dual_ppo": ("DualPPOOptimizer",),
    "game.forward_pass": ("MinMaxOutput", "MinMaxPipeline"),
    "report.page": ("write_minmax_report",),
    "report.panels": ("minmax_figure",),
    "formats": ("Critique", "parse_critique"),
    "run.trainer": ("MinMaxTrainer",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
