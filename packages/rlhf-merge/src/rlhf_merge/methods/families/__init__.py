"""All merge methods and their parameters, one family per module: functions, maths and fitting.

A method is added by a module here; its `METHODS`, and `PARAMETERS` of its own, make it known to the command
line, to configs and to the plan. Torch is imported where a method is fitted: configs are read without it.

What a method must do:

- `fit(inputs, values, space)` is called once for each tensor of the result and returns a `Step`. It may
  read the inputs first, block by block of `inputs.ranges`, for numbers that depend on the whole tensor.
- `Step.merge(start, stop, space)` is called for each block of `inputs.ranges(row_length)`, once and in
  order. It returns the merged elements, (stop - start,), in the type of the arithmetic.
- Both read through `inputs.read`, which refuses NaN and counts bytes, into buffers of `space`. The result
  may be such a buffer: it is written before the next call. Numbers that outlast a call do not stay in one,
  since the next call takes the same memory. Buffers beyond one for each input and eight are declared by
  `buffers`.

What it declares, for the plan and the checks:

- `passes`: how often each input is read by `fit` and the blocks together: 1 where `fit` reads nothing.
  Progress and the bytes of a dry run are counted by it.
- `divides`: it always divides by the sum of the weights. Negative weights, and those that sum to zero, are
  refused; where that is a choice, the parameter `normalize` says it instead.
- `from_base`: it has no base, and its first model is mergekit's `base_model`; a `base` beside one model too
  few becomes the first model.
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
