"""Names of tensors: the layer each belongs to, tied heads, and where each tensor of the result comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rlhf_merge.catalog import METHODS
from rlhf_merge.checkpoint import Checkpoint
from rlhf_merge.config import MergeConfig
from rlhf_merge.config_json import tied
from rlhf_merge.errors import MergeError
from rlhf_merge.tensors import Readable

_LAYER = re.compile(r"^((?:.*?\.)?(?:layers|h|blocks|block|layer)\.)(\d+)(\..*)$")
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|(^|\.)h\.\d+\.attn\.bias)$")
_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
_BEFORE_THE_LAYERS = re.compile(r"(embed|wte|wpe|tok_embeddings|shared\.weight)")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")

Tensors = Mapping[str, Mapping[str, Readable]]


@dataclass(frozen=True)
class LayerName:
    """A name that belongs to a layer.

    Args:
        stack: what stands before the layer's number.
        layer: the number.
        rest: what stands behind it.
    """

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
    """The depth of a tensor: i/(n-1) in layer i of n, 1 where n is 1, and 0 outside of the layers.

    Args:
        name: of the tensor.
        counts: what `layer_counts` says of its model.
    """
    found = layer_name(name)
    if found is None:
        return 0.0
    last = counts[found.stack] - 1
    return found.layer / last if last else 1.0


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a constant that old versions of transformers saved and all make anew."""
    match = _BUFFERS.search(name)
    return match is not None and (not name.endswith("attn.bias") or len(shape) == 4)


def with_heads(checkpoints: Mapping[str, Checkpoint]) -> tuple[dict[str, dict[str, Readable]], bool | None]:
    """The tensors to merge: without buffers, and with a head in all models or in none.

    A head that is tied to the embedding may be absent, or saved a second time. Where one model has a head of
    its own, the result has one, and models with a tied head lend their embedding to it.

    Args:
        checkpoints: the models.

    Returns:
        For each model its tensors, and whether the result's head is tied: False, or None where it is as in
        the model that lends its config.
    """
    tensors = {
        spec: {name: t for name, t in checkpoint.tensors.items() if not is_buffer(name, tuple(t.shape))}
        for spec, checkpoint in checkpoints.items()
    }
    own = {}
    for spec, checkpoint in checkpoints.items():
        head = next((name for name in tensors[spec] if _HEAD.search(name)), None)
        if head and tied(checkpoint.config, has_head=True):
            del tensors[spec][head]
        elif head:
            own[spec] = head
    if not own or len(own) == len(tensors):
        return tensors, None
    head = next(iter(own.values()))
    for spec in [spec for spec in tensors if spec not in own]:
        if not tied(checkpoints[spec].config, has_head=False):
            raise _missing(head, spec, next(iter(own)))
        embedding = next((name for name in tensors[spec] if name.endswith(_EMBEDDINGS)), None)
        if embedding is None:
            raise MergeError(
                f"{spec} lacks tensor {head}, which {next(iter(own))} has; merge models of one kind"
            )
        tensors[spec][head] = tensors[spec][embedding]
    return tensors, False


def source_names(config: MergeConfig, tensors: Tensors, reference: str) -> Iterator[SourceNames]:
    """Where every tensor of the result comes from.

    Args:
        config: of the merge.
        tensors: of the models, by what the config calls them.
        reference: the model whose tensors and order the result has.

    Raises:
        MergeError: a model lacks a tensor, or a layer; slices of a model without layers.
    """
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
                raise _missing(name, spec, next(s for s in tensors if name in tensors[s]))
        yield SourceNames(
            name,
            depth_of(name, counts),
            (base, name) if base else None,
            tuple((spec, name) for spec in specs),
        )


def _of_slices(config: MergeConfig, tensors: Tensors) -> Iterator[SourceNames]:
    first = tensors[config.slices[0].sources[0].model]
    stacks = layer_counts(first)
    if len(stacks) != 1:
        model = config.slices[0].sources[0].model
        raise MergeError(f"slices need a model with one stack of layers, but {model} has {len(stacks)}")
    outside = [name for name in first if layer_name(name) is None]
    for model in dict.fromkeys(source.model for part in config.slices for source in part.sources):
        for name in tensors[model]:
            if layer_name(name) is None and name not in first:
                raise _missing(name, config.slices[0].sources[0].model, model)
    before = [name for name in outside if _BEFORE_THE_LAYERS.search(name)]
    for name in before:
        yield _outside(config, tensors, name, 0)
    layer = 0
    for index, part in enumerate(config.slices):
        begin, end = part.sources[0].layers
        for step in range(end - begin):
            yield from _layer(config, tensors, index, step, layer)
            layer += 1
    for name in outside:
        if name not in before:
            yield _outside(config, tensors, name, len(config.slices) - 1)


def _outside(config: MergeConfig, tensors: Tensors, name: str, index: int) -> SourceNames:
    """A tensor before or behind the layers; it is merged as the first or the last slice is."""
    base = config.slice_base(index)
    models = config.merged(index)
    for source in (*models, *([base] if base else [])):
        if name not in tensors[source.model]:
            raise _missing(name, source.model, config.slices[0].sources[0].model)
    return SourceNames(
        name,
        0.0,
        (base.model, name) if base else None,
        tuple((source.model, name) for source in models),
        index,
    )


def _layer(config: MergeConfig, tensors: Tensors, index: int, step: int, layer: int) -> Iterator[SourceNames]:
    """The tensors of one layer of the result.

    Args:
        config: of the merge.
        tensors: of the models.
        index: of the slice.
        step: the layer's number in the slice.
        layer: its number in the result.
    """
    sources = config.slices[index].sources
    begin, end = sources[0].layers
    depth = step / (end - begin - 1) if end - begin > 1 else 1.0
    base = config.slice_base(index)
    found = {
        id(source): dict(_names_of_layer(tensors[source.model], source.layers[0] + step))
        for source in sources
    }
    rests = dict.fromkeys(rest for names in found.values() for rest in names)
    if not rests:
        raise MergeError(f"{sources[0].model} has no layer {begin + step}; slices[{index}] asks for it")
    for rest in rests:
        for source in sources:
            if rest not in found[id(source)]:
                raise _missing(f"{rest} of layer {source.layers[0] + step}", source.model, sources[0].model)
        name = layer_name(found[id(sources[0])][rest])
        assert name is not None
        yield SourceNames(
            name.of(layer),
            depth,
            (base.model, found[id(base)][rest]) if base else None,
            tuple((source.model, found[id(source)][rest]) for source in config.merged(index)),
            index,
        )


def _names_of_layer(names: Mapping[str, Readable], layer: int) -> Iterator[tuple[str, str]]:
    for name in names:
        found = layer_name(name)
        if found and found.layer == layer:
            yield found.rest, name


def _missing(name: str, spec: str, other: str) -> MergeError:
    return MergeError(
        f"{spec} lacks tensor {name}, which {other} has; only models of one kind and size can be merged"
    )
