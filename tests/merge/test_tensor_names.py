"""What names say: layers and their depths, buffers, tied heads, and where tensors come from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_merge.blocks import MemoryTensor
from rlhf_merge.config import MergeConfig
from rlhf_merge.errors import MergeError
from rlhf_merge.tensor_names import (
    LayerName,
    SourceNames,
    depth_of,
    is_buffer,
    layer_counts,
    layer_name,
    source_names,
    with_heads,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.up.weight", LayerName("model.layers.", 3, ".mlp.up.weight")),
        ("layers.10.w", LayerName("layers.", 10, ".w")),
        ("transformer.h.0.attn.c_attn.bias", LayerName("transformer.h.", 0, ".attn.c_attn.bias")),
        ("gpt_neox.layers.7.w", LayerName("gpt_neox.layers.", 7, ".w")),
        ("encoder.block.1.layer.0.w", LayerName("encoder.block.", 1, ".layer.0.w")),
        ("transformer.blocks.2.w", LayerName("transformer.blocks.", 2, ".w")),
        ("bert.encoder.layer.5.w", LayerName("bert.encoder.layer.", 5, ".w")),
        # The number of an expert is none of a layer.
        ("model.layers.4.mlp.experts.9.w1", LayerName("model.layers.", 4, ".mlp.experts.9.w1")),
        ("model.embed_tokens.weight", None),
        ("model.norm.weight", None),
        ("sublayers.3.w", None),
        ("model.layers.norm.weight", None),
    ],
)
def test_layer_name(name: str, expected: LayerName | None):
    assert layer_name(name) == expected
    if expected:
        assert expected.of(expected.layer) == name
        assert expected.of(12) == f"{expected.stack}12{expected.rest}"


def test_depth():
    counts = layer_counts([f"encoder.block.{i}.w" for i in range(5)] + ["decoder.block.0.w", "shared.weight"])
    assert counts == {"encoder.block.": 5, "decoder.block.": 1}
    depths = {"encoder.block.0.w": 0.0, "encoder.block.1.v": 0.25, "encoder.block.4.w": 1.0}
    for name, depth in (depths | {"decoder.block.0.w": 1.0, "shared.weight": 0.0}).items():
        assert depth_of(name, counts) == depth


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), True),
        ("transformer.h.1.attn.masked_bias", (), True),
        ("h.1.attn.bias", (1, 1, 8, 8), True),
        ("transformer.h.1.attn.bias", (8,), False),  # a bias, not the mask
        ("model.layers.0.self_attn.q_proj.bias", (8,), False),
        ("model.layers.0.mlp.down_proj.weight", (8, 8), False),
    ],
)
def test_buffers(name: str, shape: tuple[int, ...], expected: bool):
    assert is_buffer(name, shape) is expected


def checkpoint(head: bool, tied: bool | None = None, **more: torch.Tensor) -> Any:
    """A model that holds an embedding, perhaps a head, and says whether they are tied."""
    tensors = {EMBEDDING: torch.zeros(4, 2), "model.layers.0.w": torch.zeros(2)}
    tensors |= {HEAD: torch.ones(4, 2)} if head else {}
    config = {} if tied is None else {"tie_word_embeddings": tied}
    stored = {name: MemoryTensor(tensor) for name, tensor in (tensors | more).items()}
    return SimpleNamespace(tensors=stored, config=config)


@pytest.mark.parametrize(
    ("first", "second", "heads", "tied"),
    [
        # None has a head, or the one that was saved is the embedding once more.
        (checkpoint(False, True), checkpoint(False, True), ("", ""), None),
        (checkpoint(True, True), checkpoint(False, True), ("", ""), None),
        (checkpoint(False), checkpoint(True, True), ("", ""), None),
        # All have one.
        (checkpoint(True, False), checkpoint(True), ("own", "own"), None),
        # One of them has: the other lends its embedding, and the result is untied.
        (checkpoint(True, False), checkpoint(False, True), ("own", "embedding"), False),
        (checkpoint(False), checkpoint(True), ("embedding", "own"), False),
        (checkpoint(True, True), checkpoint(True, False), ("embedding", "own"), False),
    ],
)
def test_heads(first: Any, second: Any, heads: tuple[str, str], tied: bool | None):
    tensors, found = with_heads({"a": first, "b": second})
    assert found is tied
    for spec, model, head in zip("ab", (first, second), heads, strict=True):
        expected = {"": None, "own": model.tensors.get(HEAD), "embedding": model.tensors[EMBEDDING]}[head]
        assert tensors[spec].get(HEAD) is expected
        assert EMBEDDING in tensors[spec]


def test_a_model_with_neither_head_nor_embedding():
    broken = SimpleNamespace(tensors={"w": MemoryTensor(torch.zeros(2))}, config={})
    with pytest.raises(MergeError, match=r"b lacks tensor lm_head.weight, which a has"):
        with_heads({"a": checkpoint(True, False), "b": broken})  # type: ignore[dict-item]


def test_buffers_are_left_out():
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors, _ = with_heads({"a": checkpoint(False, True, **{name: torch.zeros(2)})})
    assert name not in tensors["a"] and EMBEDDING in tensors["a"]


def names(*layers: int) -> dict[str, Any]:
    return {name: None for name in (EMBEDDING, *(f"model.layers.{i}.w" for i in layers), "model.norm.weight")}


def test_sources_of_models():
    config = MergeConfig.from_dict({"method": "ties", "base": "base", "models": ["a", "b"]})
    tensors = {spec: names(0, 1, 2) for spec in ("base", "a", "b")}
    found = list(source_names(config, tensors, "base"))
    assert [(source.output, source.depth) for source in found] == [
        (EMBEDDING, 0),
        ("model.layers.0.w", 0),
        ("model.layers.1.w", 0.5),
        ("model.layers.2.w", 1),
        ("model.norm.weight", 0),
    ]
    assert found[2] == SourceNames(
        "model.layers.1.w",
        0.5,
        ("base", "model.layers.1.w"),
        (("a", "model.layers.1.w"), ("b", "model.layers.1.w")),
    )


def test_a_base_that_lends_its_config_needs_no_tensors():
    config = MergeConfig.from_dict({"method": "linear", "base": "base", "models": ["a", "b"]})
    tensors = {"base": {}, "a": names(0, 1), "b": names(0, 1)}
    found = list(source_names(config, tensors, "base"))
    assert {source.base for source in found} == {None} and len(found) == 4


@pytest.mark.parametrize("lacking", ["base", "a", "b"])
def test_a_missing_tensor_is_named(lacking: str):
    config = MergeConfig.from_dict({"method": "ties", "base": "base", "models": ["a", "b"]})
    tensors = {spec: names(0) if spec == lacking else names(0, 1) for spec in ("base", "a", "b")}
    other = "a" if lacking == "base" else "base"
    with pytest.raises(MergeError, match=f"{lacking} lacks tensor model.layers.1.w, which {other} has"):
        list(source_names(config, tensors, "base"))


def sliced(method: str, *slices: list[dict[str, Any]], **more: Any) -> MergeConfig:
    values = {"method": method, "slices": [{"sources": sources} for sources in slices]}
    return MergeConfig.from_dict(values | more)


def test_sources_of_slices():
    config = sliced(
        "passthrough",
        [{"model": "a", "layers": [0, 2]}],
        [{"model": "b", "layers": [1, 2]}],
        [{"model": "a", "layers": [1, 4]}],
    )
    found = list(source_names(config, {"a": names(0, 1, 2, 3), "b": names(0, 1)}, "a"))
    layers = [(source.output, *source.models[0], source.depth, source.slice_index) for source in found]
    assert layers == [
        (EMBEDDING, "a", EMBEDDING, 0, 0),
        ("model.layers.0.w", "a", "model.layers.0.w", 0, 0),
        ("model.layers.1.w", "a", "model.layers.1.w", 1, 0),
        ("model.layers.2.w", "b", "model.layers.1.w", 1, 1),  # a slice of one layer is at its end
        ("model.layers.3.w", "a", "model.layers.1.w", 0, 2),
        ("model.layers.4.w", "a", "model.layers.2.w", 0.5, 2),
        ("model.layers.5.w", "a", "model.layers.3.w", 1, 2),
        ("model.norm.weight", "a", "model.norm.weight", 0, 2),
    ]


def test_what_lies_outside_of_the_layers_goes_with_the_first_and_the_last_slice():
    config = sliced(
        "linear",
        [{"model": "a", "layers": [0, 1]}, {"model": "b", "layers": [1, 2]}],
        [{"model": "b", "layers": [0, 1]}, {"model": "c", "layers": [1, 2]}],
    )
    found = list(source_names(config, {spec: names(0, 1) for spec in "abc"}, "a"))
    assert [[spec for spec, _ in source.models] for source in found] == [["a", "b"]] * 2 + [["b", "c"]] * 2
    assert found[1].models == (("a", "model.layers.0.w"), ("b", "model.layers.1.w"))


def test_slices_with_a_base_of_other_layers():
    config = sliced(
        "task_arithmetic",
        [{"model": "a", "layers": [0, 1]}, {"model": "base", "layers": [1, 2]}],
        base="base",
    )
    found = list(source_names(config, {spec: names(0, 1) for spec in ("a", "base")}, "base"))
    assert found[1].base == ("base", "model.layers.1.w")
    assert found[1].models == (("a", "model.layers.0.w"),)


def test_slices_refused():
    tensors: dict[str, dict[str, Any]] = {"a": names(0, 1), "b": names(0, 1)}
    deep = sliced("passthrough", [{"model": "a", "layers": [1, 3]}])
    with pytest.raises(MergeError, match=r"a has no layer 2; slices\[0\] asks for it"):
        list(source_names(deep, tensors, "a"))
    two = sliced("linear", [{"model": "a", "layers": [0, 1]}, {"model": "b", "layers": [0, 1]}])
    lacking = tensors | {"b": {**names(), "model.layers.0.v": None}}
    with pytest.raises(MergeError, match=r"b lacks tensor \.w of layer 0, which a has"):
        list(source_names(two, lacking, "a"))
    without_norm: dict[str, Any] = {EMBEDDING: None, "model.layers.0.w": None}
    with pytest.raises(MergeError, match=r"b lacks tensor model\.norm\.weight, which a has"):
        list(source_names(two, tensors | {"b": without_norm}, "a"))
    stacks = {"encoder.layers.0.w": None, "decoder.layers.0.w": None}
    with pytest.raises(MergeError, match="slices need a model with one stack of layers, but a has 2"):
        list(source_names(two, {"a": stacks, "b": stacks}, "a"))  # type: ignore[dict-item]
