"""All merge methods and their parameters, one family per module: functions, maths and fitting.

A method is added by a module here; its `METHODS`, and `PARAMETERS` of its own, make it known to the command
line, to configs and to the plan. Torch is imported where a method is fitted: configs are read without it.
"""

from __future__ import annotations

import importlib
import pkgutil

from rlhf_merge.methods.spec import METHODS, PARAMETERS

__all__ = ["METHODS", "PARAMETERS", "PER_MODEL"]

for _module in pkgutil.iter_modules(__path__):
    _family = importlib.import_module(f"{__name__}.{_module.name}")
    METHODS.update(_family.METHODS)
    PARAMETERS.update(getattr(_family, "PARAMETERS", {}))

PER_MODEL = tuple(name for name, parameter in PARAMETERS.items() if parameter.per_model)
"""The parameters that each model has for itself; the others belong to the whole merge."""
