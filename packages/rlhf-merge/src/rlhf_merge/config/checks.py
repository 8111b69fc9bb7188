"""What only a whole config can tell: whether its parts fit together, and the parameters at one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from rlhf_merge.config.settings import Setting, resolve
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS, PER_MODEL
from rlhf_merge.methods.spec import Values

if TYPE_CHECKING:
    from rlhf_merge.config.merge_config import MergeConfig, Slice

# A sum of weights that cancel, such as 0.1 + 0.2 - 0.3, is off zero by rounding: about 1e-16 of the weights.
_CANCELS = 1e-9


def check(config: MergeConfig) -> None:
    """Check what only the config as a whole can tell."""
    if bool(config.models) == bool(config.slices):
        found = "both are given" if config.models else "neither is given"
        raise MergeError(f"a config has either models or slices, and {found}; give one of them")
    if config.stack is not None and not config.slices:
        raise MergeError("stack says which layers slices cut, and there are none; leave it out")
    if METHODS[config.method].base == "required" and config.base is None:
        raise MergeError(f"{config.method} needs a base model and none is given; name it as the base")
    _check_parameters(config)
    if config.slices:
        for index, part in enumerate(config.slices):
            _check_slice(config, part, index)
    else:
        _check_models(config)
    _check_vocab(config)
    _check_constants(config)


def _check_parameters(config: MergeConfig) -> None:
    _check_names(config.method, config.parameters, "")
    for index, entry in enumerate(config.models):
        _check_names(config.method, entry.parameters, f"models[{index}]", of_model=True)
    for index, part in enumerate(config.slices):
        _check_names(config.method, part.parameters, f"slices[{index}]")
        for place, source in enumerate(part.sources):
            where = f"slices[{index}].sources[{place}]"
            _check_names(config.method, source.parameters, where, of_model=True)


def _check_names(method: str, parameters: Mapping[str, object], where: str, of_model: bool = False) -> None:
    taken = METHODS[method].parameters
    for name in parameters:
        path = f"{where}.{name}" if where else name
        if name not in taken:
            others = f"it takes {', '.join(taken)}" if taken else "it takes none"
            raise MergeError(f"{path}: {method} takes no parameter {name}; {others}")
        if of_model and name not in PER_MODEL:
            raise MergeError(f"{path}: {name} belongs to the whole merge, not to one model; move it there")


def _check_models(config: MergeConfig) -> None:
    if METHODS[config.method].base == "required":
        for index, entry in enumerate(config.models):
            if entry.model == config.base:
                raise MergeError(
                    f"models[{index}] is the base {config.base}, which {config.method} does not merge "
                    "with itself; leave it out of models"
                )
    _check_count(config.method, len(config.models), "models")


def _check_slice(config: MergeConfig, part: Slice, index: int) -> None:
    where = f"slices[{index}]"
    if METHODS[config.method].base == "required":
        base = part.base or config.base
        found = [source for source in part.sources if source.model == base]
        if len(found) != 1:
            raise MergeError(
                f"{where}.sources lists the base {base} {len(found)} times, expected once; "
                "list it with the layers that belong to the slice"
            )
        if found[0].parameters:
            names = ", ".join(found[0].parameters)
            raise MergeError(f"{where}.sources gives the base {base} {names}, which it cannot use; remove it")
    elif part.base is not None:
        raise MergeError(
            f"{where} has a base of its own, which {config.method} does not use; leave it out there"
        )
    lengths = {source.layers[1] - source.layers[0] for source in part.sources}
    if len(lengths) > 1:
        listed = ", ".join(f"{source.model} {list(source.layers)}" for source in part.sources)
        raise MergeError(f"{where} has sources of different lengths: {listed}; give all as many layers")
    _check_count(config.method, len(config.merged(index)), f"{where}.sources")


def _check_count(method: str, count: int, where: str) -> None:
    low, high = METHODS[method].models
    if low <= count and (high is None or count <= high):
        return
    expected = f"{low}" if low == high else f"at least {low}"
    base = ", the base not counted" if METHODS[method].base == "required" else ""
    advice = "remove some" if high is not None and count > high else "add some"
    plural = "" if low == 1 else "s"
    raise MergeError(f"{where} holds {count}, but {method} merges {expected} model{plural}{base}; {advice}")


def _check_vocab(config: MergeConfig) -> None:
    if config.vocab in (None, "union", "truncate"):
        return
    if config.vocab == "base":
        if config.base is None:
            raise MergeError("the vocabulary is to be the base's, but no base is given; name it or a model")
    elif config.vocab not in config.model_specs:
        raise MergeError(
            f"the vocabulary is to be that of {config.vocab!r}, expected union, truncate, base or a model of "
            f"the merge: {', '.join(config.model_specs)}"
        )


def evaluate(
    config: MergeConfig,
    tensor: str,
    depth: float,
    slice_index: int | None = None,
    source_tensors: Sequence[str] | None = None,
) -> Values:
    """Evaluate every parameter of the config's method for one tensor; see `MergeConfig.values`."""
    values = _resolve(config, tensor, depth, slice_index, source_tensors)
    _check_weights(config.method, values, f"at tensor {tensor}")
    _check_probabilities(config, values, slice_index, f"at tensor {tensor}")
    return values


def _check_constants(config: MergeConfig) -> None:
    """Check what `evaluate` checks for the values that are the same for every tensor."""
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
