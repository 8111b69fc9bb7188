"""All merge methods and their parameters, gathered from the modules of `families`."""

from __future__ import annotations

import importlib
import pkgutil

from rlhf_merge.methods import families
from rlhf_merge.methods.spec import Method, Parameter

PARAMETERS: dict[str, Parameter] = {
    "weight": Parameter(1.0, "how much of a model goes into the result", per_model=True),
    "lambda": Parameter(1.0, "factor of the merged task vector"),
    "normalize": Parameter(False, "divide by the weights that went in"),
    "density": Parameter(
        1.0, "share of a task vector's elements that is kept", 0.0, 1.0, low_open=True, per_model=True
    ),
    "rescale": Parameter(True, "divide what is kept by the probability to keep it"),
    "sign": Parameter("mass", "how the sign of an element is elected", choices=("mass", "count")),
    "t": Parameter(0.5, "how far to go from the first model to the second", 0.0, 1.0),
}
"""Every parameter of every method: those that families share, then each family's own `PARAMETERS`. A method
may have another default."""

METHODS: dict[str, Method] = {}
"""The methods by name: the `METHODS` of each family."""

for _module in pkgutil.iter_modules(families.__path__):
    _family = importlib.import_module(f"{families.__name__}.{_module.name}")
    METHODS |= _family.METHODS
    PARAMETERS |= getattr(_family, "PARAMETERS", {})

PER_MODEL = tuple(name for name, parameter in PARAMETERS.items() if parameter.per_model)
"""The parameters that each model has for itself; the others belong to the whole merge."""
