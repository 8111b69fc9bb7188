"""What a tensor is, told from its name: its layer, and its part of the layer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rlhf_merge.names.tensor_names import LayerName, layer_name

EMBEDDING, NORM, HEAD, OTHER = "embedding", "norm", "head", "other"
_OUTSIDE = (EMBEDDING, NORM, OTHER, HEAD)
"""The rows of tensors outside of the layers; the first stands before the layers, the others behind them."""

_NORM = re.compile(r"norm|(^|\.)ln(_|\d|\.|$)", re.IGNORECASE)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output|score|classifier|cls|qa_outputs)\.")
_EMBEDDING = re.compile(r"embed|embd|(^|\.)(wte|wpe|shared)\.", re.IGNORECASE)
_CROSS = re.compile(r"cross_?att|encdec|encoder_attn", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_?forward|moe|expert", re.IGNORECASE)

_ATTENTION_PARTS = {
    "q": {"q", "q_proj", "query", "wq", "q_lin"},
    "k": {"k", "k_proj", "key", "wk", "k_lin"},
    "v": {"v", "v_proj", "value", "wv", "v_lin"},
    "qkv": {"qkv", "qkv_proj", "query_key_value", "wqkv", "c_attn"}
    | {"in_proj", "in_proj_weight", "in_proj_bias"},
    "o": {"o", "o_proj", "out_proj", "c_proj", "dense", "wo", "out_lin", "proj"},
}
_MLP_PARTS = {
    "gate": {"gate_proj", "w1", "wi_0"},
    "up": {"up_proj", "w3", "wi", "wi_1", "c_fc", "fc1", "fc_in", "lin1", "dense_h_to_4h"},
    "gate_up": {"gate_up_proj"},
    "down": {"down_proj", "w2", "wo", "c_proj", "fc2", "fc_out", "lin2", "dense_4h_to_h", "dense"},
    "router": {"gate", "router"},
}
_ORDER = [
    *(f"attn.{part}" for part in _ATTENTION_PARTS),
    *(f"cross.{part}" for part in _ATTENTION_PARTS),
    *(f"mlp.{part}" for part in _MLP_PARTS),
]


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs in a table of layers by kinds.

    Args:
        row: the layer ("7", or "encoder 7" where the model has several stacks of layers), or, outside of the
            layers, embedding, norm, other or head.
        kind: attn.q, mlp.down, norm and so on; of an unknown architecture, the name's end.  Outside of the
            layers, the same as `row`.
        in_layer: whether the row is a layer.
        position: rows are ordered by it.
    """

    row: str
    kind: str
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
    names_of_stacks = dict.fromkeys(layer.stack for layer in found.values() if layer)
    stacks = sorted(
        names_of_stacks, key=lambda stack: "decoder" in stack
    )  # files are often in alphabetical order
    labels = dict(zip(stacks, _stack_labels(stacks), strict=True))
    return {
        name: _outside(name)
        if layer is None
        else Place(
            f"{labels[layer.stack]} {layer.layer}".strip(),
            _kind_in_layer(layer),
            True,
            (1, stacks.index(layer.stack), layer.layer),
        )
        for name, layer in found.items()
    }


def ordered_rows(places: Iterable[Place]) -> list[str]:
    """The rows from the embedding to the head."""
    positions = {place.row: place.position for place in places}
    return sorted(positions, key=lambda row: positions[row])


def ordered_kinds(places: Iterable[Place]) -> list[str]:
    """The kinds of the layers' tensors: attention, MLP, others as they come, norms."""
    kinds = dict.fromkeys(place.kind for place in places if place.in_layer)
    known = [kind for kind in _ORDER if kind in kinds]
    rest = [kind for kind in kinds if kind not in known and kind != NORM]
    first = [kind for kind in rest if kind.startswith(("attn.", "cross."))]
    attention = [kind for kind in known if not kind.startswith("mlp.")]
    others = [kind for kind in rest if kind not in first]
    mlp = [kind for kind in known if kind.startswith("mlp.")]
    return [*attention, *first, *mlp, *others, *([NORM] if NORM in kinds else [])]


def _stack_labels(stacks: list[str]) -> list[str]:
    """What is different in the names of the stacks: encoder and decoder; nothing where there is one stack."""
    if len(stacks) < 2:
        return ["" for _ in stacks]
    words = [stack.rstrip(".").split(".") for stack in stacks]
    while all(len(of) > 1 and of[0] == words[0][0] for of in words):
        words = [of[1:] for of in words]
    while all(len(of) > 1 and of[-1] == words[0][-1] for of in words):
        words = [of[:-1] for of in words]
    return [".".join(of) for of in words]


def _outside(name: str) -> Place:
    if _NORM.search(name):
        row = NORM
    elif _HEAD.search(name):
        row = HEAD
    elif _EMBEDDING.search(name) or name.endswith(("wte", "wpe")):
        row = EMBEDDING
    else:
        row = OTHER
    index = _OUTSIDE.index(row)
    return Place(row, row, False, (2 if index else 0, index, 0))


def _kind_in_layer(layer: LayerName) -> str:
    words = [word for word in layer.rest.strip(".").split(".") if not word.isdigit()]
    if len(words) > 1 and words[-1] in ("weight", "bias"):
        words.pop()
    path = ".".join(words)
    if _NORM.search(path):
        return NORM
    if _CROSS.search(path) or _ATTENTION.search(path):
        family = "cross" if _CROSS.search(path) else "attn"
        return f"{family}.{_part(_ATTENTION_PARTS, words[-1])}"
    if words[-1] == "dense" and "intermediate" in words:
        return "mlp.up"
    if _MLP.search(path) or any(words[-1].lower() in names for names in _MLP_PARTS.values()):
        return f"mlp.{_part(_MLP_PARTS, words[-1])}"
    return path


def _part(parts: dict[str, set[str]], word: str) -> str:
    return next((part for part, names in parts.items() if word.lower() in names), word)
