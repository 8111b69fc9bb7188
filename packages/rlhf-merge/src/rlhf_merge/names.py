"""Names of tensors: layer and depth, which have a row for each token, and which are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from rlhf_merge.errors import MergeError

if TYPE_CHECKING:
    from rlhf_merge.methods.blocks import Readable

_LAYER = re.compile(r"^((?:.*?\.)?(?:layers|h|blocks|block|layer|stages)\.)(\d+)(\..*)$")

EMBEDDINGS = (
    *("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight"),
    *("embed_in.weight", "shared.weight", "embeddings.weight"),
)
"""Names of input embeddings, the surest first; the last is Mamba's."""
_HEADS = (
    *("lm_head.weight", "lm_head.bias", "lm_head.decoder.weight", "lm_head.decoder.bias"),
    *("cls.predictions.bias", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    *("output.weight", "embed_out.weight"),
)
"""Names of output heads and of their biases."""


@dataclass(frozen=True)
class LayerName:
    """A name in a layer: its part before the layer's number, the number, and its part after it."""

    stack: str
    layer: int
    rest: str


def layer_name(name: str) -> LayerName | None:
    """The parts of a name that belongs to a layer; None of any other."""
    match = _LAYER.match(name)
    return LayerName(match[1], int(match[2]), match[3]) if match else None


def layer_counts(names: Iterable[str]) -> dict[str, int]:
    """The number of layers of each stack of layers: one in most models, two in an encoder-decoder."""
    counts: dict[str, int] = {}
    for found in filter(None, map(layer_name, names)):
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


def ends_with(name: str, endings: Iterable[str]) -> bool:
    """Whether a name is one of some, or ends with a dot and one of them."""
    return any(name == ending or name.endswith("." + ending) for ending in endings)


def vocabulary_rows(tensors: Mapping[str, Readable]) -> int | None:
    """The rows of a model's input embedding, or None where no tensor has the name of one."""
    for ending in EMBEDDINGS:
        for name, tensor in tensors.items():
            if ends_with(name, (ending,)) and len(tensor.shape) == 2:
                return tensor.shape[0]
    return None


def is_vocabulary_tensor(name: str, shape: Sequence[int], rows: int | None) -> bool:
    """Whether a tensor has a row for each token: by its name and by its first dimension, the rows."""
    return rows is not None and tuple(shape[:1]) == (rows,) and ends_with(name, (*EMBEDDINGS, *_HEADS))


def check_present(
    names: Iterable[str], specs: Iterable[str], tensors: Mapping[str, Mapping[str, Readable]]
) -> None:
    """Refuse a name that one of these models lacks."""
    for name, spec in product(names, specs):
        if name not in tensors[spec]:
            advice = "merge models with the same layers, or give slices"
            if not layer_name(name):
                pattern = f"{name.rpartition('.')[0]}.*" if "." in name else name
                advice = f"merge models that have the same tensors, or leave it out: --ignore '{pattern}'"
            owner = next((other for other, own in tensors.items() if name in own), next(iter(tensors)))
            message = f"{spec} lacks tensor {name}, which {owner} has; {advice}"
            raise MergeError(message, code="missing_tensor", tensor=name, model=spec)
