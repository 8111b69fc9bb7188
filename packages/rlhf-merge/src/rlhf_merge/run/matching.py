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

from rlhf_merge.errors import MergeError, damaged
from rlhf_merge.files.checkpoint import Checkpoint
from rlhf_merge.files.config_json import tied
from rlhf_merge.lora.tensors import same_values
from rlhf_merge.names.tensor_names import endings, layer_name, missing
from rlhf_merge.tensors import Readable

_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|\.masked_bias|(^|\.)h\.\d+\.attn\.bias|(^|\.)(position|token_type)_ids)$"
)
_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
_EMBEDDINGS = (
    *("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight"),
)

_SHARED = re.compile(r"(^|\.)(encoder|decoder)\.embed_tokens\.weight$")
"""Copies of `shared.weight`, which every architecture that has it makes anew."""
_COPIES = re.compile(
    r"(^|\.)(lm_head|embed_out|lm_head\.decoder|cls\.predictions\.decoder|qa_outputs|generator_lm_head)\."
    r"(weight|bias)$"
)
"""Heads, which may be copies of the embedding, and their biases, which may be copies of `….bias` beside."""

Models = dict[str, dict[str, Readable]]


@dataclass(frozen=True)
class Matched:
    """The tensors of models, by the same names.

    Args:
        tensors: of each model, without buffers and copies, with a head in all models or in none.
        tied: whether the result's head is the embedding: False, or None where it is as in the model that
            lends its config.
        named_by: the model whose names the others' were brought to; None where they agree.
        ignored: names of the tensors that were left out because a pattern fits them.
        lent: the head of each model that has its embedding in its place.
    """

    tensors: Models
    tied: bool | None
    named_by: str | None
    ignored: tuple[str, ...]
    lent: dict[str, str]


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a constant that old versions of transformers saved and all make anew."""
    match = _BUFFERS.search(name)
    return match is not None and (not name.endswith("attn.bias") or len(shape) == 4)


def matched(checkpoints: Mapping[str, Checkpoint], ignore: Sequence[str] = ()) -> Matched:
    """The tensors to merge or to compare.

    A head that is tied to the embedding may be absent, or saved a second time. Where one model has a head of
    its own, the result has one, and models with a tied head lend their embedding to it.
    """
    tensors, named_by = _named(checkpoints)
    tensors, ignored = without(tensors, ignore)
    _drop_copies(tensors)
    lent = _match_heads(tensors, checkpoints)
    return Matched(tensors, False if lent else None, named_by, ignored, lent)


def check_alike(tensors: Sequence[tuple[str, str, Readable]]) -> None:
    """Refuse tensors, each with its model and name there, of different shapes, or integers of other types."""
    label, _, first = tensors[0]
    for spec, name, tensor in tensors[1:]:
        if tuple(tensor.shape) != tuple(first.shape):
            raise MergeError(
                f"tensor {name} has shape {list(tensor.shape)} in {spec} but {list(first.shape)} in {label}; "
                "only models of one architecture and size belong together",
                code="different_shapes",
                tensor=name,
            )
        floating = tensor.dtype.is_floating_point and first.dtype.is_floating_point
        if tensor.dtype != first.dtype and not floating:
            raise MergeError(
                f"tensor {name} is {tensor.dtype} in {spec} but {first.dtype} in {label}; make them alike",
                code="different_dtypes",
                tensor=name,
            )


def without(
    tensors: Mapping[str, Mapping[str, Readable]], ignore: Sequence[str]
) -> tuple[Models, tuple[str, ...]]:
    """The tensors whose names no pattern fits, and the names of the others."""
    every = dict.fromkeys(name for own in tensors.values() for name in own)
    ignored: dict[str, None] = {}
    for pattern in ignore:
        fitting = [name for name in every if fnmatchcase(name, pattern)]
        if not fitting:
            raise MergeError(f"ignore: no tensor of the models fits {pattern!r}; correct it or take it away")
        for name in fitting:
            if all(name in own for own in tensors.values()):
                raise MergeError(
                    f"ignore: {pattern!r} fits tensor {name}, which all models have; give a narrower one",
                    code="ignored_common_tensor",
                    tensor=name,
                )
        ignored |= dict.fromkeys(fitting)
    kept = {
        spec: {name: t for name, t in own.items() if name not in ignored} for spec, own in tensors.items()
    }
    return kept, tuple(ignored)


def uneven(checkpoints: Mapping[str, Checkpoint], ignore: Sequence[str]) -> list[str]:
    """The names, as patterns, of the tensors that a pattern fits and some of the models lack."""
    tensors, _ = _named(checkpoints)
    every = dict.fromkeys(name for own in tensors.values() for name in own)
    return [
        escape(name)
        for name in every
        if any(fnmatchcase(name, pattern) for pattern in ignore)
        and not all(name in own for own in tensors.values())
    ]


def _named(checkpoints: Mapping[str, Checkpoint]) -> tuple[Models, str | None]:
    """The tensors without buffers, by the names of one model, and that model where any name changed."""
    return _renamed(
        {
            spec: {name: t for name, t in checkpoint.tensors.items() if not is_buffer(name, tuple(t.shape))}
            for spec, checkpoint in checkpoints.items()
        }
    )


def _renamed(tensors: Models) -> tuple[Models, str | None]:
    """The tensors by the names of the model with the longest, and that model where any name changed."""

    def length(spec: str) -> int:
        return max((name.count(".") for name in tensors[spec] if layer_name(name)), default=0)

    leader = max(tensors, key=length)
    stacks = {found.stack for name in tensors[leader] if (found := layer_name(name))}
    prefixes = {spec: _prefix(tensors[leader], own) for spec, own in tensors.items()}
    every = {name for spec, own in tensors.items() if not prefixes[spec] for name in own}

    def new_name(name: str, prefix: str) -> str:
        layer = layer_name(name)
        known = prefix + layer.stack in stacks if layer else prefix + name in every
        return prefix + name if known else name

    result = {
        spec: {new_name(name, prefix): tensor for name, tensor in tensors[spec].items()}
        if prefix
        else tensors[spec]
        for spec, prefix in prefixes.items()
    }
    return result, leader if any(prefixes.values()) else None


def _prefix(longer: Mapping[str, Readable], shorter: Mapping[str, Readable]) -> str:
    """What stands before the names of layers in `longer` and not in `shorter`; empty where nothing does."""
    for name in longer:
        if layer_name(name) and name not in shorter:
            for ending in endings(name):
                if ending in shorter and ending not in longer:
                    return name.removesuffix(ending)
    return ""


def _drop_copies(tensors: Models) -> None:
    """Leave out second copies of embeddings and biases; of heads, where some model lacks them."""
    for own in tensors.values():
        for name in list(own):
            everywhere = all(name in other for other in tensors.values())
            shared = _SHARED.search(name)
            if not (shared or (_COPIES.search(name) and not everywhere)):
                continue
            if any(same_values(own[name], own[other]) for other in _originals(name, own)):
                del own[name]


def _originals(name: str, own: Mapping[str, Readable]) -> list[str]:
    """The tensors that one may be a copy of."""
    if name.endswith("bias"):
        return [
            other for other in (name.replace(".decoder.bias", ".bias"),) if other != name and other in own
        ]
    ends = ("shared.weight",) if _SHARED.search(name) else _EMBEDDINGS
    return [other for other in own if other.endswith(ends) and other != name]


def _match_heads(tensors: Models, checkpoints: Mapping[str, Checkpoint]) -> dict[str, str]:
    """Give all models a head or none; the head of each model that lends its embedding to it."""
    heads = {}
    for spec, checkpoint in checkpoints.items():
        head = next((name for name in tensors[spec] if _HEAD.search(name)), None)
        with damaged(f"config.json of {spec}"):
            copied = tied(checkpoint.config, has_head=True)
        if head and copied:
            del tensors[spec][head]
        elif head:
            heads[spec] = head
    if not heads or len(heads) == len(tensors):
        return {}
    lent = {}
    owner, head = next(iter(heads.items()))
    for spec in [spec for spec in tensors if spec not in heads]:
        embedding = next((name for name in tensors[spec] if name.endswith(_EMBEDDINGS)), None)
        if embedding is None or not tied(checkpoints[spec].config, has_head=False):
            raise missing(head, spec, owner)
        tensors[spec][head] = tensors[spec][embedding]
        lent[spec] = head
    return lent
