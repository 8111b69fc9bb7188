"""What only a whole config can tell: whether its parts fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS, PER_MODEL

if TYPE_CHECKING:
    from rlhf_merge.config.merge_config import MergeConfig, Slice


def check(config: MergeConfig) -> None:
    """Check what only the config as a whole can tell."""
    if bool(config.models) == bool(config.slices):
        found = "both are given" if config.models else "neither is given"
        raise MergeError(
            f"a config has either models or slices, and {found}; give one of them", code="conflicting_options"
        )
    if config.stack is not None and not config.slices:
        raise MergeError(
            "stack says which layers slices cut, and there are none; leave it out",
            code="unused_key",
            key="stack",
        )
    based = METHODS[config.method].base == "required"
    if based and config.base is None:
        raise MergeError(
            f"{config.method} needs a base model and none is given; name it as the base", code="missing_value"
        )
    _check_parameters(config.method, config.parameters, "")
    for index, entry in enumerate(config.models):
        _check_parameters(config.method, entry.parameters, f"models[{index}].", of_model=True)
        if based and entry.model == config.base:
            raise MergeError(
                f"models[{index}] is the base {config.base} of {config.method}; leave it out of models",
                code="repeated_model",
            )
    if config.models:
        _check_count(config.method, len(config.models), "models")
    for index, part in enumerate(config.slices):
        _check_slice(config, part, index)
    _check_vocab(config)


def _check_parameters(
    method: str, parameters: Mapping[str, object], where: str, of_model: bool = False
) -> None:
    taken = METHODS[method].parameters
    for name in parameters:
        if name not in taken:
            others = ", ".join(taken) or "none"
            raise MergeError(
                f"{where}{name}: {method} takes no parameter {name}; it takes {others}",
                code="unknown_key",
                key=name,
            )
        if of_model and name not in PER_MODEL:
            raise MergeError(
                f"{where}{name}: {name} belongs to the whole merge, not to one model; move it there"
            )


def _check_slice(config: MergeConfig, part: Slice, index: int) -> None:
    where = f"slices[{index}]"
    _check_parameters(config.method, part.parameters, f"{where}.")
    for place, source in enumerate(part.sources):
        _check_parameters(config.method, source.parameters, f"{where}.sources[{place}].", of_model=True)
    if METHODS[config.method].base == "required":
        base = part.base or config.base
        found = [source for source in part.sources if source.model == base]
        if len(found) != 1:
            raise MergeError(
                f"{where}.sources lists the base {base} {len(found)} times; list it once, with its layers",
                code="repeated_model",
            )
        if found[0].parameters:
            names = ", ".join(found[0].parameters)
            raise MergeError(
                f"{where}.sources gives the base {base} {names}, which it cannot use; remove it",
                code="repeated_model",
            )
    elif part.base is not None:
        raise MergeError(
            f"{where} has a base of its own, which {config.method} does not use; leave it out there",
            code="repeated_model",
        )
    if len({source.layers[1] - source.layers[0] for source in part.sources}) > 1:
        listed = ", ".join(f"{source.model} {list(source.layers)}" for source in part.sources)
        raise MergeError(f"{where} has sources of different lengths: {listed}; give all as many layers")
    _check_count(config.method, len(config.merged(index)), f"{where}.sources")


def _check_count(method: str, count: int, where: str) -> None:
    low, high = METHODS[method].models
    if low <= count and (high is None or count <= high):
        return
    expected = f"{low}" if low == high else f"at least {low}"
    base = ", the base not counted" if METHODS[method].base == "required" else ""
    advice = "add some" if count < low else "remove some"
    plural = "" if low == 1 else "s"
    raise MergeError(f"{where} holds {count}, but {method} merges {expected} model{plural}{base}; {advice}")


def _check_vocab(config: MergeConfig) -> None:
    if config.vocab == "base" and config.base is None:
        raise MergeError(
            "the vocabulary is to be the base's, but no base is given; name it or a model",
            code="missing_value",
        )
    known = (None, "union", "truncate", "base", *config.model_specs)
    if config.vocab not in known:
        raise MergeError(
            f"vocab is {config.vocab!r}, expected union, truncate, base or one of "
            f"{', '.join(config.model_specs)}",
            code="invalid_value",
        )
