"""Sources of every tensor of the result: one name in all models, or a layer of a slice's sources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.blocks import Readable
from rlhf_merge.methods.families import METHODS
from rlhf_merge.names import depth_of, layer_counts, layer_name, missing

_INNER = re.compile(r"\.(layers|blocks|block)\.\d+\.")
_NOT_TEXT = re.compile(r"vision|visual|image|audio|speech")
_BEFORE_THE_LAYERS = re.compile(r"(embed|wte|wpe|tok_embeddings|shared\.weight)")

Tensors = Mapping[str, Mapping[str, Readable]]


@dataclass(frozen=True)
class SourceNames:
    """Sources of one tensor of the result."""

    output: str
    depth: float
    """Of its layer, in [0, 1]."""
    base: tuple[str, str] | None
    """The base's spec and the tensor's name there, where the method has a base."""
    models: tuple[tuple[str, str], ...]
    slice_index: int | None = None

    @property
    def all(self) -> tuple[tuple[str, str], ...]:
        """The base, where there is one, and the models."""
        return (self.base, *self.models) if self.base else self.models


def source_names(config: MergeConfig, tensors: Tensors, reference: str) -> Iterator[SourceNames]:
    """Sources of every tensor of the result, in the order of the reference or of the slices."""
    if config.slices:
        yield from _of_slices(config, tensors)
        return
    specs = [entry.model for entry in config.merged()]
    base = config.base if METHODS[config.method].base == "required" else None
    used: dict[str, None] = dict.fromkeys([*([base] if base else []), *specs])
    names = dict.fromkeys([*tensors[reference], *(name for spec in used for name in tensors[spec])])
    counts = layer_counts(names)
    for name in names:
        for spec in used:
            if name not in tensors[spec]:
                raise missing(name, spec, next(s for s in tensors if name in tensors[s]))
        models = tuple((spec, name) for spec in specs)
        yield SourceNames(name, depth_of(name, counts), (base, name) if base else None, models)


def _of_slices(config: MergeConfig, tensors: Tensors) -> Iterator[SourceNames]:
    """The layers of the slices, behind what goes with the first slice and before what goes with the last."""
    model = config.slices[0].sources[0].model
    counts = layer_counts(tensors[model])
    stack = _cut_stack(config.stack, tensors[model], list(counts), model)
    used = dict.fromkeys(source.model for part in config.slices for source in part.sources)
    every = {name: layer_name(name) for spec in used for name in tensors[spec]}
    outside = [name for name, found in every.items() if not found or found.stack != stack]
    for name in outside:
        if name not in tensors[model]:
            raise missing(name, model, next(spec for spec in tensors if name in tensors[spec]))
    before = [name for name in outside if every[name] or _BEFORE_THE_LAYERS.search(name)]
    for name in before:
        yield _of_slice(config, tensors, 0, name, depth_of(name, counts))
    yield from _layers(config, tensors, stack)
    for name in outside:
        if name not in before:
            yield _of_slice(config, tensors, len(config.slices) - 1, name, 0.0)


def _layers(config: MergeConfig, tensors: Tensors, stack: str) -> Iterator[SourceNames]:
    """The layers of the slices, one after the other."""
    rests: dict[tuple[str, int], list[str]] = {}  # by model and layer, the ends of its tensors' names
    for spec, own in tensors.items():
        for found in filter(None, map(layer_name, own)):
            if found.stack == stack:
                rests.setdefault((spec, found.layer), []).append(found.rest)
    layer = 0
    for index, part in enumerate(config.slices):
        count = part.sources[0].layers[1] - part.sources[0].layers[0]
        for step in range(count):
            places = [(source.model, source.layers[0] + step) for source in part.sources]
            ends = dict.fromkeys(rest for place in places for rest in rests.get(place, ()))
            if not ends:
                message = f"{places[0][0]} has no layer {places[0][1]}; slices[{index}] asks for it"
                raise MergeError(message, code="missing_layer", model=places[0][0], layer=places[0][1])
            depth = step / (count - 1) if count > 1 else 1.0
            for rest in ends:
                own = [f"{stack}{number}{rest}" for _, number in places]
                yield _of_slice(config, tensors, index, f"{stack}{layer}{rest}", depth, own)
            layer += 1


def _of_slice(
    config: MergeConfig,
    tensors: Tensors,
    index: int,
    output: str,
    depth: float,
    names: Sequence[str] | None = None,
) -> SourceNames:
    """A tensor of a slice, by its names in the slice's sources where they are not that of the output."""
    sources, base = config.slices[index].sources, config.slice_base(index)
    places = []
    for source, name in zip(sources, names or [output] * len(sources), strict=True):
        if name not in tensors[source.model]:
            raise missing(
                name, source.model, next((s for s in tensors if name in tensors[s]), sources[0].model)
            )
        places.append((source, (source.model, name)))
    of_base = next((place for source, place in places if source is base), None)
    return SourceNames(output, depth, of_base, tuple(p for source, p in places if source is not base), index)


def _cut_stack(word: str | None, names: Mapping[str, Readable], stacks: Sequence[str], model: str) -> str:
    """The stack of layers that slices cut: the only one, or the one whose name has the word in it."""
    fitting = [stack for stack in stacks if word is None or word in stack]
    if len(fitting) != 1:
        found = ", ".join(stack.rstrip(".") for stack in stacks) or "none"
        how = f"and {word!r} is in the names of {len(fitting)}" if word else "name one as stack in the config"
        message = f"slices cut one stack of layers, but {model} has {len(stacks)} ({found}); {how}"
        raise MergeError(message, code="ambiguous_stack", model=model)
    (stack,) = fitting
    if len(stacks) > 1 and _NOT_TEXT.search(stack):
        message = f"the stack {stack.rstrip('.')} of {model} is not its language model's; cut that one"
        raise MergeError(message, code="unsupported_stack", model=model)
    for name in names:  # stages are of different sizes and have layers of their own
        inner = name.startswith(stack) and _INNER.search(name.removeprefix(stack))
        if inner or (name.startswith(stack) and stack.endswith("stages.")):
            message = f"{model} has layers inside of stages ({name}), which slices cannot move"
            raise MergeError(message, code="layers_in_stages", model=model)
    return stack
