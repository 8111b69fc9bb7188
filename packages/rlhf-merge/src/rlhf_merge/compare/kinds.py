"""Classification of tensors by name: their layer, and their part of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rlhf_merge.names import LayerName, layer_name

EMBEDDING, NORM, HEAD, OTHER = "embedding", "norm", "head", "other"
_OUTSIDE = (EMBEDDING, NORM, OTHER, HEAD)
"""Rows of tensors outside of the layers; the first precedes the layers, the others follow them."""

_NORM = re.compile(r"norm|(^|\.)ln(_|\d|\.|$)", re.IGNORECASE)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output|score|classifier|cls|qa_outputs)\.")
_EMBEDDING = re.compile(r"embed|embd|(^|\.)(wte|wpe|shared)(\.|$)", re.IGNORECASE)
_CROSS = re.compile(r"cross_?att|encdec|encoder_attn", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_?forward|moe|expert", re.IGNORECASE)

_ATTENTION_PARTS = {
    "q": "q q_proj query wq q_lin",
    "k": "k k_proj key wk k_lin",
    "v": "v v_proj value wv v_lin",
    "qkv": "qkv qkv_proj query_key_value wqkv c_attn in_proj in_proj_weight in_proj_bias",
    "o": "o o_proj out_proj c_proj dense wo out_lin proj",
}
_MLP_PARTS = {
    "gate": "gate_proj w1 wi_0",
    "up": "up_proj w3 wi wi_1 c_fc fc1 fc_in lin1 dense_h_to_4h",
    "gate_up": "gate_up_proj",
    "down": "down_proj w2 wo c_proj fc2 fc_out lin2 dense_4h_to_h dense",
    "router": "gate router",
}
_ORDER = [f"{family}.{part}" for family in ("attn", "cross") for part in _ATTENTION_PARTS]
_ORDER += [f"mlp.{part}" for part in _MLP_PARTS]


@dataclass(frozen=True)
class Place:
    """A tensor's cell in a table of layers by kinds; rows are ordered by `position`."""

    row: str
    """The layer ("7", or "encoder 7" of several stacks), or, outside, embedding, norm, other or head."""
    kind: str
    """attn.q, mlp.down, norm and so on; of an unknown architecture, the name's end; outside, the row."""
    in_layer: bool
    position: tuple[int, int, int]

    @property
    def family(self) -> str:
        """Attention, mlp or norm; any other kind is other, embedding and head among them."""
        known = {"attn": "attention", "cross": "attention", "mlp": "mlp", NORM: NORM}
        return known.get(self.kind.split(".")[0], OTHER)


def place_tensors(names: Iterable[str]) -> dict[str, Place]:
    """The place of every tensor of one model, in the order of the names."""
    found = {name: layer_name(name) for name in names}
    # Files are often in alphabetical order, which puts the decoder first.
    stacks = sorted(
        dict.fromkeys(layer.stack for layer in found.values() if layer), key=lambda stack: "decoder" in stack
    )
    labels = dict(zip(stacks, _stack_labels(stacks), strict=True))
    places = {}
    for name, layer in found.items():
        if layer is not None:
            row, position = (
                f"{labels[layer.stack]} {layer.layer}",
                (1, stacks.index(layer.stack), layer.layer),
            )
            places[name] = Place(row.strip(), _kind_in_layer(layer), True, position)
            continue
        kinds = ((NORM, _NORM), (HEAD, _HEAD), (EMBEDDING, _EMBEDDING))
        row = next((kind for kind, pattern in kinds if pattern.search(name)), OTHER)
        index = _OUTSIDE.index(row)
        places[name] = Place(row, row, False, (2 if index else 0, index, 0))
    return places


def ordered_rows(places: Iterable[Place]) -> list[str]:
    """The rows from the embedding to the head."""
    positions = {place.row: place.position for place in places}
    return sorted(positions, key=lambda row: positions[row])


def ordered_kinds(places: Iterable[Place]) -> list[str]:
    """The kinds of the layers' tensors: attention, MLP, others as they come, norms."""

    def position(kind: str) -> tuple[int, int]:
        family = 3 if kind == NORM else {"attn": 0, "cross": 0, "mlp": 1}.get(kind.split(".")[0], 2)
        known = kind in _ORDER
        return (2 if family == 1 and not known else family), (_ORDER.index(kind) if known else len(_ORDER))

    return sorted(dict.fromkeys(place.kind for place in places if place.in_layer), key=position)


def _stack_labels(stacks: list[str]) -> list[str]:
    """The distinguishing part of the stacks' names: encoder and decoder; empty with one stack."""
    words = [stack.rstrip(".").split(".") for stack in stacks]
    for end, rest in ((0, slice(1, None)), (-1, slice(0, -1))):
        while all(len(of) > 1 and of[end] == words[0][end] for of in words) and len(words) > 1:
            words = [of[rest] for of in words]
    return [".".join(of) if len(words) > 1 else "" for of in words]


def _kind_in_layer(layer: LayerName) -> str:
    words = [word for word in layer.rest.strip(".").split(".") if not word.isdigit()]
    if len(words) > 1 and words[-1] in ("weight", "bias"):
        words.pop()
    path, last = ".".join(words), words[-1].lower()
    if _NORM.search(path):
        return NORM
    if _CROSS.search(path) or _ATTENTION.search(path):
        family, parts = "cross" if _CROSS.search(path) else "attn", _ATTENTION_PARTS
    elif last == "dense" and "intermediate" in words:
        return "mlp.up"
    elif _MLP.search(path) or any(last in names.split() for names in _MLP_PARTS.values()):
        family, parts = "mlp", _MLP_PARTS
    else:
        return path
    return f"{family}.{next((part for part, names in parts.items() if last in names.split()), words[-1])}"
