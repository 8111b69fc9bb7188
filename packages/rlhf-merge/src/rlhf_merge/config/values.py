"""The values that a config gives a method's parameters at one tensor, and whether they fit together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from rlhf_merge.config.gradients import Setting, resolve
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS, PER_MODEL
from rlhf_merge.methods.values import Values

if TYPE_CHECKING:
    from rlhf_merge.config.merge_config import MergeConfig

# A sum of weights that cancel, such as 0.1 + 0.2 - 0.3, is off zero by rounding: about 1e-16 of the weights.
_CANCELS = 1e-9


def evaluate(
    config: MergeConfig,
    tensor: str,
    depth: float,
    slice_index: int | None = None,
    source_tensors: Sequence[str] | None = None,
) -> Values:
    """Evaluate every parameter of the config's method for one tensor and check that they fit together.

    Args:
        config: The merge.
        tensor: The tensor's name in the output.
        depth: In [0, 1].
        slice_index: Which slice the tensor belongs to; None where the config has no slices.
        source_tensors: The tensor's name in each model, which the filters of per-model parameters look
            at; None where it is everywhere the output's.

    Raises:
        MergeError: the weights sum to zero where they divide, or della's probabilities leave (0, 1].
    """
    values = _resolve(config, tensor, depth, slice_index, source_tensors)
    _check_weights(config.method, values, f"at tensor {tensor}")
    _check_probabilities(config, values, slice_index, f"at tensor {tensor}")
    return values


def check_constants(config: MergeConfig) -> None:
    """Check the values that are the same for every tensor.

    Raises:
        MergeError: as `evaluate` does, for parameters that do not depend on the tensor.
    """
    for index in range(len(config.slices)) if config.slices else (None,):
        place = "in models" if index is None else f"in slices[{index}]"
        values = _resolve(config, "", 0.0, index, None)
        if _are_constant(config, ("weight", "normalize"), index):
            _check_weights(config.method, values, place)
        if _are_constant(config, ("density", "epsilon"), index):
            _check_probabilities(config, values, index, place)


def _resolve(
    config: MergeConfig,
    tensor: str,
    depth: float,
    slice_index: int | None,
    source_tensors: Sequence[str] | None,
) -> Values:
    entries, common = config.merged(slice_index), _common(config, slice_index)
    defaults = METHODS[config.method].parameters
    names = source_tensors or [tensor] * len(entries)
    per_model = tuple(
        {
            key: cast(float, resolve(key, (entry.parameters, *common), defaults[key], name, depth))
            for key in defaults
            if key in PER_MODEL
        }
        for entry, name in zip(entries, names, strict=True)
    )
    shared = {
        key: resolve(key, common, defaults[key], tensor, depth) for key in defaults if key not in PER_MODEL
    }
    return Values(per_model, shared)


def _common(config: MergeConfig, slice_index: int | None) -> tuple[Mapping[str, Setting], ...]:
    own = () if slice_index is None else (config.slices[slice_index].parameters,)
    return (*own, config.parameters)


def _are_constant(config: MergeConfig, names: Iterable[str], slice_index: int | None) -> bool:
    common = _common(config, slice_index)
    chains = [(entry.parameters, *common) for entry in config.merged(slice_index)]
    settings = [
        next((scope[name] for scope in chain if name in scope), None) for chain in chains for name in names
    ]
    return all(setting is None or setting.constant for setting in settings)


def _check_weights(method: str, values: Values, place: str) -> None:
    weights = [own["weight"] for own in values.per_model if "weight" in own]
    if not weights or not values.shared.get("normalize", METHODS[method].divides):
        return
    # Where signs are elected, each element is divided by the sizes of the weights that agree.
    elects = "sign" in METHODS[method].parameters
    sizes = [abs(weight) for weight in weights]
    total = sum(sizes) if elects else abs(math.fsum(weights))
    if total <= _CANCELS * sum(sizes):
        listed = ", ".join(f"{weight:g}" for weight in weights)
        found = "are all zero" if elects else "sum to zero"
        advice = " or set normalize: false" if "normalize" in values.shared else ""
        raise MergeError(
            f"the weights {listed} {place} {found}, and {method} divides by their sum; change one{advice}"
        )


def _check_probabilities(config: MergeConfig, values: Values, slice_index: int | None, place: str) -> None:
    for entry, own in zip(config.merged(slice_index), values.per_model, strict=True):
        if "epsilon" not in own or own["density"] == 1:
            continue
        density, epsilon = own["density"], own["epsilon"]
        # 1e-9 is for sums such as 0.9 + 0.1 that rounding may put above one.
        if density - epsilon <= 0 or density + epsilon > 1 + 1e-9:
            raise MergeError(
                f"model {entry.model} has density {density:g} and epsilon {epsilon:g} {place}, and "
                f"{config.method} keeps elements with probabilities from density - epsilon, to be > 0, "
                "to density + epsilon, to be <= 1; make epsilon smaller or density 1"
            )
