"""Bringing models together whose files name or hold the same tensors differently.

Checkpoints of one architecture differ in what was saved beside the weights (buffers, second copies of tied
weights) and in the prefix of their names: `h.0.…` in a model without its head is `transformer.h.0.…` in one
with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape

from rlhf_merge.errors import MergeError, readable
from rlhf_merge.files.checkpoint import Checkpoint
from rlhf_merge.files.config_json import tied
from rlhf_merge.methods.blocks import Readable, same_values
from rlhf_merge.names import EMBEDDINGS, check_present, endings, ends_with, layer_name

_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|\.masked_bias|(^|\.)h\.\d+\.attn\.bias|(^|\.)(position|token_type)_ids)$"
)
_SHARED = re.compile(r"(^|\.)(encoder|decoder)\.embed_tokens\.weight$")
"""Copies of `shared.weight`, which every architecture that has it restores on loading."""
_COPIES = re.compile(
    r"(^|\.)(lm_head|embed_out|lm_head\.decoder|cls\.predictions\.decoder|qa_outputs|generator_lm_head)\."
    r"(weight|bias)$"
)
"""Heads, which may be copies of the embedding, and their biases, which may be copies of `….bias` beside."""

Models = dict[str, dict[str, Readable]]


@dataclass(frozen=True)
class Matched:
    """The tensors of models by the same names, without buffers and copies, with a head in all or in none."""

    tensors: Models
    tied: bool | None
    """Whether the result's head is the embedding: False, or None where the config that is lent says it."""
    named_by: str | None
    """The model whose names the others' were brought to; None where they agree."""
    ignored: tuple[str, ...]
    """Names of the tensors that were left out because a pattern fits them."""
    lent: dict[str, str]
    """LM head name, for each model whose tied embedding stands in for it."""


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a constant that old versions of transformers saved and all versions recompute."""
    match = _BUFFERS.search(name)
    return match is not None and (not name.endswith("attn.bias") or len(shape) == 4)


def matched(checkpoints: Mapping[str, Checkpoint], ignore: Sequence[str] = ()) -> Matched:
    """The tensors to merge or to compare.

    A head that is tied to the embedding may be absent, or saved a second time. Where one model has a head of
    its own, the result has one, and models with a tied head lend their embedding to it.
    """
    tensors, named_by = _named(checkpoints)
    tensors, ignored = without(tensors, ignore)
    for own in tensors.values():
        for name in list(own):
            everywhere = all(name in other for other in tensors.values())
            copy = _SHARED.search(name) or (_COPIES.search(name) and not everywhere)
            if copy and any(same_values(own[name], own[other]) for other in _originals(name, own)):
                del own[name]
    lent = _match_heads(tensors, checkpoints)
    return Matched(tensors, False if lent else None, named_by, ignored, lent)


def check_alike(tensors: Sequence[tuple[str, str, Readable]]) -> None:
    """Refuse tensors, each with its model and name there, of different shapes, or integers of other types."""
    label, _, first = tensors[0]
    for spec, name, tensor in tensors[1:]:
        if tuple(tensor.shape) != tuple(first.shape):
            shapes = f"{list(tensor.shape)} in {spec} but {list(first.shape)} in {label}"
            message = f"tensor {name} has shape {shapes}; only models of the same shape can be merged"
            raise MergeError(message, code="different_shapes", tensor=name, model=spec)
        floating = tensor.dtype.is_floating_point and first.dtype.is_floating_point
        if tensor.dtype != first.dtype and not floating:
            types = f"{tensor.dtype} in {spec} but {first.dtype} in {label}"
            message = f"tensor {name} is {types}; make them alike"
            raise MergeError(message, code="different_dtypes", tensor=name, model=spec)


def without(
    tensors: Mapping[str, Mapping[str, Readable]], ignore: Sequence[str]
) -> tuple[Models, tuple[str, ...]]:
    """The tensors whose names no pattern fits, and the names of the others."""
    every = dict.fromkeys(name for own in tensors.values() for name in own)
    ignored: dict[str, None] = {}
    for pattern in ignore:
        fitting = [name for name in every if fnmatchcase(name, pattern)]
        if not fitting:
            message = f"ignore: no tensor of the models fits {pattern!r}; correct or remove it"
            raise MergeError(message, code="unmatched_pattern", pattern=pattern)
        for name in fitting:
            if all(name in own for own in tensors.values()):
                message = f"ignore: {pattern!r} fits {name}, which all models have; give a narrower one"
                raise MergeError(message, code="ignored_common_tensor", tensor=name)
        ignored |= dict.fromkeys(fitting)
    kept = {
        spec: {k: tensor for k, tensor in own.items() if k not in ignored} for spec, own in tensors.items()
    }
    return kept, tuple(ignored)


def uneven(checkpoints: Mapping[str, Checkpoint], ignore: Sequence[str]) -> list[str]:
    """The names, as patterns, of the tensors that a pattern fits and some of the models lack."""
    tensors, _ = _named(checkpoints)
    every = dict.fromkeys(name for own in tensors.values() for name in own)
    some = [name for name in every if not all(name in own for own in tensors.values())]
    return [escape(name) for name in some if any(fnmatchcase(name, pattern) for pattern in ignore)]


def _named(checkpoints: Mapping[str, Checkpoint]) -> tuple[Models, str | None]:
    """The tensors without buffers, by the names of the model with the longest, and that where any changed."""
    tensors = {
        spec: {k: tensor for k, tensor in checkpoint.tensors.items() if not is_buffer(k, tuple(tensor.shape))}
        for spec, checkpoint in checkpoints.items()
    }
    leader = max(
        tensors,
        key=lambda spec: max((name.count(".") for name in tensors[spec] if layer_name(name)), default=0),
    )
    stacks = {found.stack for name in tensors[leader] if (found := layer_name(name))}
    prefixes = {spec: _prefix(tensors[leader], own) for spec, own in tensors.items()}
    every = {name for spec, own in tensors.items() if not prefixes[spec] for name in own}
    for spec, prefix in prefixes.items():
        if not prefix:
            continue
        renamed: dict[str, Readable] = {}
        for name, tensor in tensors[spec].items():
            layer = layer_name(name)
            known = prefix + layer.stack in stacks if layer else prefix + name in every
            renamed[prefix + name if known else name] = tensor
        tensors[spec] = renamed
    return tensors, leader if any(prefixes.values()) else None


def _prefix(longer: Mapping[str, Readable], shorter: Mapping[str, Readable]) -> str:
    """The prefix that the names of layers have in `longer` and not in `shorter`; empty if there is none."""
    for name in longer:
        if layer_name(name) and name not in shorter:
            for ending in endings(name):
                if ending in shorter and ending not in longer:
                    return name.removesuffix(ending)
    return ""


def _originals(name: str, own: Mapping[str, Readable]) -> list[str]:
    """The tensors that one may be a copy of."""
    if name.endswith("bias"):
        original = name.replace(".decoder.bias", ".bias")
        return [original] if original != name and original in own else []
    names = ("shared.weight",) if _SHARED.search(name) else EMBEDDINGS
    return [other for other in own if ends_with(other, names) and other != name]


def _match_heads(tensors: Models, checkpoints: Mapping[str, Checkpoint]) -> dict[str, str]:
    """Give all models a head or none; the head of each model that lends its embedding to it."""
    heads = {}
    for spec, checkpoint in checkpoints.items():
        head = next((name for name in tensors[spec] if ends_with(name, ("lm_head.weight",))), None)
        with readable(f"config.json of {spec}"):
            copied = tied(checkpoint.config, has_head=True)
        if head and copied:
            del tensors[spec][head]
        elif head:
            heads[spec] = head
    if not heads or len(heads) == len(tensors):
        return {}
    head, lacking = next(iter(heads.values())), [spec for spec in tensors if spec not in heads]
    lent = {}
    for spec in lacking:
        embedding = next((name for name in tensors[spec] if ends_with(name, EMBEDDINGS)), None)
        if embedding is not None and tied(checkpoints[spec].config, has_head=False):
            lent[spec] = {head: tensors[spec][embedding]}
    check_present([head], [spec for spec in lacking if spec not in lent], tensors)
    for spec, added in lent.items():
        tensors[spec] |= added
    return dict.fromkeys(lent, head)
