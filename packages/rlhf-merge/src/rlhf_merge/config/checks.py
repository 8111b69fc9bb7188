"""Checks of a whole config: parameters against the method, the base, the number of models, the slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rlhf_merge.config.values import check_constants
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS, PER_MODEL

if TYPE_CHECKING:
    from rlhf_merge.config.merge_config import MergeConfig, Slice


def check(config: MergeConfig) -> None:
    """Check what only the config as a whole can tell.

    Raises:
        MergeError: the first mistake found, named with its path.
    """
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
    check_constants(config)


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
        listed = _listed(f"{source.model} {list(source.layers)}" for source in part.sources)
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
            f"the merge: {_listed(config.model_specs)}"
        )


def _listed(items: Iterable[str]) -> str:
    return ", ".join(items)
