"""What names say: layers and their depths, buffers, tied heads, and where tensors come from."""

from __future__ import annotations

from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.names.tensor_names import (
    LayerName,
    SourceNames,
    depth_of,
    layer_counts,
    layer_name,
    source_names,
)

EMBEDDING = "model.embed_tokens.weight"


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
        # A hierarchical model's stages are its layers: 4 stages of depth 0, 1/3, 2/3 and 1.
        ("resnet.encoder.stages.2.layers.1.w", LayerName("resnet.encoder.stages.", 2, ".layers.1.w")),
        ("swin.encoder.layers.1.blocks.0.w", LayerName("swin.encoder.layers.", 1, ".blocks.0.w")),
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
    with raises_error("missing_tensor", tensor="model.layers.1.w", model=lacking):
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
    with raises_error("missing_layer", model="a"):
        list(source_names(deep, tensors, "a"))
    two = sliced("linear", [{"model": "a", "layers": [0, 1]}, {"model": "b", "layers": [0, 1]}])
    lacking = tensors | {"b": {**names(), "model.layers.0.v": None}}
    with raises_error("missing_tensor", tensor=".w of layer 0", model="b"):
        list(source_names(two, lacking, "a"))
    without_norm: dict[str, Any] = {EMBEDDING: None, "model.layers.0.w": None}
    with raises_error("missing_tensor", tensor="model.norm.weight", model="b"):
        list(source_names(two, tensors | {"b": without_norm}, "a"))
    stacks = {"encoder.layers.0.w": None, "decoder.layers.0.w": None}
    with raises_error("ambiguous_stack"):
        list(source_names(two, {"a": stacks, "b": stacks}, "a"))  # type: ignore[dict-item]


def test_slices_of_one_stack_of_several():
    """The text is cut, the images' layers go with the first slice at their own depths."""
    images = [f"vision_tower.layers.{i}.w" for i in range(3)]
    tensors: dict[str, dict[str, Any]] = {
        "a": dict.fromkeys([*images, *(f"language_model.layers.{i}.w" for i in range(4)), "norm.w"])
    }
    parts = ([{"model": "a", "layers": [0, 2]}], [{"model": "a", "layers": [3, 4]}])
    found = list(source_names(sliced("passthrough", *parts, stack="language"), tensors, "a"))
    assert [(source.output, source.models[0][1], source.depth, source.slice_index) for source in found] == [
        ("vision_tower.layers.0.w", "vision_tower.layers.0.w", 0, 0),
        ("vision_tower.layers.1.w", "vision_tower.layers.1.w", 0.5, 0),
        ("vision_tower.layers.2.w", "vision_tower.layers.2.w", 1, 0),
        ("language_model.layers.0.w", "language_model.layers.0.w", 0, 0),
        ("language_model.layers.1.w", "language_model.layers.1.w", 1, 0),
        ("language_model.layers.2.w", "language_model.layers.3.w", 1, 1),
        ("norm.w", "norm.w", 0, 1),
    ]
    for word, code in (
        (None, "ambiguous_stack"),
        ("layers", "ambiguous_stack"),
        ("vision", "unsupported_stack"),
    ):
        config = sliced("passthrough", *parts, **({"stack": word} if word else {}))
        with raises_error(code):
            list(source_names(config, tensors, "a"))


@pytest.mark.parametrize("name", ["encoder.stages.{}.layers.0.w", "encoder.layers.{}.blocks.1.w"])
def test_slices_of_stages_are_refused(name: str):
    tensors: dict[str, dict[str, Any]] = {"a": dict.fromkeys(name.format(i) for i in range(3))}
    with raises_error("layers_in_stages"):
        list(source_names(sliced("passthrough", [{"model": "a", "layers": [0, 2]}]), tensors, "a"))


def test_a_stack_without_slices_is_refused():
    with raises_error("unused_key", key="stack"):
        MergeConfig.from_dict({"method": "linear", "models": ["a"], "stack": "text"})
