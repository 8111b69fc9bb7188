"""Names of tensors: the layer each belongs to, tied heads, and where each tensor of the result comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS
from rlhf_merge.tensors import Readable

_LAYER = re.compile(r"^((?:.*?\.)?(?:layers|h|blocks|block|layer|stages)\.)(\d+)(\..*)$")
_INNER = re.compile(r"\.(layers|blocks|block)\.\d+\.")
_NOT_TEXT = re.compile(r"vision|visual|image|audio|speech")
_BEFORE_THE_LAYERS = re.compile(r"(embed|wte|wpe|tok_embeddings|shared\.weight)")

Tensors = Mapping[str, Mapping[str, Readable]]


@dataclass(frozen=True)
class LayerName:
    """A name in a layer: what stands before the layer's number, the number, what stands behind."""

    stack: str
    layer: int
    rest: str

    def of(self, layer: int) -> str:
        """The same tensor's name in another layer."""
        return f"{self.stack}{layer}{self.rest}"


@dataclass(frozen=True)
class SourceNames:
    """Where one tensor of the result comes from.

    Args:
        output: its name.
        depth: of its layer, in [0, 1].
        base: the base's spec and the tensor's name there, where the method has a base.
        models: the same for each model.
        slice_index: the slice it belongs to, where the config has slices.
    """

    output: str
    depth: float
    base: tuple[str, str] | None
    models: tuple[tuple[str, str], ...]
    slice_index: int | None = None

    @property
    def all(self) -> tuple[tuple[str, str], ...]:
        """The base, where there is one, and the models."""
        return (self.base, *self.models) if self.base else self.models


def layer_name(name: str) -> LayerName | None:
    """The parts of a name that belongs to a layer; None of any other."""
    match = _LAYER.match(name)
    return LayerName(match[1], int(match[2]), match[3]) if match else None


def layer_counts(names: Iterable[str]) -> dict[str, int]:
    """The number of layers of each stack of layers: one in most models, two in an encoder-decoder."""
    counts: dict[str, int] = {}
    for name in names:
        found = layer_name(name)
        if found:
            counts[found.stack] = max(counts.get(found.stack, 0), found.layer + 1)
    return counts


def depth_of(name: str, counts: Mapping[str, int]) -> float:
    """The depth of a tensor: i/(n-1) in layer i of n, 1 where n is 1, and 0 outside of the layers."""
    found = layer_name(name)
    if found is None:
        return 0.0
    last = counts[found.stack] - 1
    return found.layer / last if last else 1.0


def endings(name: str) -> Iterator[str]:
    """The name, then without one leading part after another, as far as the layer's number stays."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    last = numbers[0] - 1 if numbers else len(parts) - 2
    for index in range(max(last, 0) + 1):
        yield ".".join(parts[index:])


def source_names(config: MergeConfig, tensors: Tensors, reference: str) -> Iterator[SourceNames]:
    """Where every tensor of the result comes from."""
    if config.slices:
        return _of_slices(config, tensors)
    return _of_models(config, tensors, reference)


def _of_models(config: MergeConfig, tensors: Tensors, reference: str) -> Iterator[SourceNames]:
    specs = [entry.model for entry in config.merged()]
    base = config.base if METHODS[config.method].base == "required" else None
    used: dict[str, None] = dict.fromkeys([*([base] if base else []), *specs])
    names = dict.fromkeys([*tensors[reference], *(name for spec in used for name in tensors[spec])])
    counts = layer_counts(names)
    for name in names:
        for spec in used:
            if name not in tensors[spec]:
                raise missing(name, spec, next(s for s in tensors if name in tensors[s]))
        yield SourceNames(
            name,
            depth_of(name, counts),
            (base, name) if base else None,
            tuple((spec, name) for spec in specs),
        )


def _of_slices(config: MergeConfig, tensors: Tensors) -> Iterator[SourceNames]:
    model = config.slices[0].sources[0].model
    first = tensors[model]
    stacks = layer_counts(first)
    stack = _cut_stack(config.stack, list(stacks), model)
    _check_flat(first, stack, model)
    outside = [name for name in first if not _is_in(name, stack)]
    for other in dict.fromkeys(source.model for part in config.slices for source in part.sources):
        for name in tensors[other]:
            if not _is_in(name, stack) and name not in first:
                raise missing(name, model, other)
    before = [name for name in outside if layer_name(name) or _BEFORE_THE_LAYERS.search(name)]
    for name in before:
        yield _outside(config, tensors, name, 0, depth_of(name, stacks))
    layer = 0
    for index, part in enumerate(config.slices):
        begin, end = part.sources[0].layers
        for step in range(end - begin):
            yield from _layer(config, tensors, (index, step, layer), stack)
            layer += 1
    for name in outside:
        if name not in before:
            yield _outside(config, tensors, name, len(config.slices) - 1, 0.0)


def _cut_stack(word: str | None, stacks: Sequence[str], model: str) -> str:
    """The stack of layers that slices cut: the only one, or the one whose name has the word in it."""
    fitting = [stack for stack in stacks if word is None or word in stack]
    if len(fitting) != 1:
        found = ", ".join(stack.rstrip(".") for stack in stacks) or "none"
        how = f"and {word!r} is in the names of {len(fitting)}" if word else "name one as stack in the config"
        raise MergeError(
            f"slices cut one stack of layers, but {model} has {len(stacks)} ({found}); {how}",
            code="ambiguous_stack",
        )
    if len(stacks) > 1 and _NOT_TEXT.search(fitting[0]):
        raise MergeError(
            f"the stack {fitting[0].rstrip('.')} of {model} is not its language model's; cut that one",
            code="unsupported_stack",
        )
    return fitting[0]


def _check_flat(names: Iterable[str], stack: str, model: str) -> None:
    """Refuse stages, which are of different sizes and have layers of their own."""
    for name in names:
        if _is_in(name, stack) and (stack.endswith("stages.") or _INNER.search(name.removeprefix(stack))):
            raise MergeError(
                f"{model} has layers inside of stages ({name}), which slices cannot move; merge whole models",
                code="layers_in_stages",
            )


def _is_in(name: str, stack: str) -> bool:
    found = layer_name(name)
    return found is not None and found.stack == stack


def _outside(config: MergeConfig, tensors: Tensors, name: str, index: int, depth: float) -> SourceNames:
    """A tensor outside of the layers that are cut; it is merged as the first or the last slice is."""
    base = config.slice_base(index)
    models = config.merged(index)
    for source in (*models, *([base] if base else [])):
        if name not in tensors[source.model]:
            raise missing(name, source.model, config.slices[0].sources[0].model)
    return SourceNames(
        name,
        depth,
        (base.model, name) if base else None,
        tuple((source.model, name) for source in models),
        index,
    )


def _layer(
    config: MergeConfig, tensors: Tensors, place: tuple[int, int, int], stack: str
) -> Iterator[SourceNames]:
    """The tensors of one layer of the result."""
    index, step, layer = place
    sources = config.slices[index].sources
    begin, end = sources[0].layers
    depth = step / (end - begin - 1) if end - begin > 1 else 1.0
    base = config.slice_base(index)
    found = {
        id(source): dict(_names_of_layer(tensors[source.model], stack, source.layers[0] + step))
        for source in sources
    }
    rests = dict.fromkeys(rest for names in found.values() for rest in names)
    if not rests:
        raise MergeError(
            f"{sources[0].model} has no layer {begin + step}; slices[{index}] asks for it",
            code="missing_layer",
            model=sources[0].model,
        )
    for rest in rests:
        for source in sources:
            if rest not in found[id(source)]:
                raise missing(f"{rest} of layer {source.layers[0] + step}", source.model, sources[0].model)
        name = layer_name(found[id(sources[0])][rest])
        assert name is not None
        yield SourceNames(
            name.of(layer),
            depth,
            (base.model, found[id(base)][rest]) if base else None,
            tuple((source.model, found[id(source)][rest]) for source in config.merged(index)),
            index,
        )


def _names_of_layer(names: Mapping[str, Readable], stack: str, layer: int) -> Iterator[tuple[str, str]]:
    for name in names:
        found = layer_name(name)
        if found and found.layer == layer and found.stack == stack:
            yield found.rest, name


def missing(name: str, spec: str, other: str) -> MergeError:
    """The error for a tensor that one model has and another lacks."""
    advice = "merge models with the same layers, or give slices"
    if not layer_name(name):
        pattern = f"{name.rpartition('.')[0]}.*" if "." in name else name
        advice = f"merge models that have the same tensors, or leave it out: --ignore '{pattern}'"
    return MergeError(
        f"{spec} lacks tensor {name}, which {other} has; {advice}",
        code="missing_tensor",
        tensor=name,
        model=spec,
    )
