"""Where every tensor of the result comes from: models, and the layers of slices."""

from __future__ import annotations

from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.run.plan import SourceNames, source_names

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
TIES = {"method": "ties", "base": "base", "models": ["a", "b"]}


def names(*layers: int) -> dict[str, Any]:
    return dict.fromkeys([EMBEDDING, *(f"model.layers.{i}.w" for i in layers), NORM])


def found(config: MergeConfig | dict[str, Any], tensors: dict[str, Any], first: str) -> list[SourceNames]:
    config = config if isinstance(config, MergeConfig) else MergeConfig.from_dict(config)
    return list(source_names(config, tensors, first))


def sliced(method: str, *slices: dict[str, tuple[int, int]], **more: Any) -> MergeConfig:
    """Slices, each with the ranges of layers by model."""
    listed = [
        {"sources": [{"model": model, "layers": layers} for model, layers in part.items()]} for part in slices
    ]
    return MergeConfig.from_dict({"method": method, "slices": listed} | more)


def test_sources_of_models() -> None:
    sources = found(TIES, {spec: names(0, 1, 2) for spec in ("base", "a", "b")}, "base")
    depths = {EMBEDDING: 0, "model.layers.0.w": 0, "model.layers.1.w": 0.5, "model.layers.2.w": 1, NORM: 0}
    assert {source.output: source.depth for source in sources} == depths
    name = "model.layers.1.w"
    assert sources[2] == SourceNames(name, 0.5, ("base", name), (("a", name), ("b", name)))


def test_a_base_that_lends_its_config_needs_no_tensors() -> None:
    tensors = {"base": {}, "a": names(0, 1), "b": names(0, 1)}
    sources = found(TIES | {"method": "linear"}, tensors, "base")
    assert {source.base for source in sources} == {None} and len(sources) == 4


@pytest.mark.parametrize("lacking", ["base", "a", "b"])
def test_a_missing_tensor_is_named(lacking: str) -> None:
    tensors = {spec: names(0) if spec == lacking else names(0, 1) for spec in ("base", "a", "b")}
    with raises_error("missing_tensor", tensor="model.layers.1.w", model=lacking):
        found(TIES, tensors, "base")


def test_sources_of_slices() -> None:
    config = sliced("passthrough", {"a": (0, 2)}, {"b": (1, 2)}, {"a": (1, 4)})
    sources = found(config, {"a": names(0, 1, 2, 3), "b": names(0, 1)}, "a")
    assert [(source.output, *source.models[0], source.depth, source.slice_index) for source in sources] == [
        (EMBEDDING, "a", EMBEDDING, 0, 0),
        ("model.layers.0.w", "a", "model.layers.0.w", 0, 0),
        ("model.layers.1.w", "a", "model.layers.1.w", 1, 0),
        ("model.layers.2.w", "b", "model.layers.1.w", 1, 1),  # a slice of one layer is at its end
        ("model.layers.3.w", "a", "model.layers.1.w", 0, 2),
        ("model.layers.4.w", "a", "model.layers.2.w", 0.5, 2),
        ("model.layers.5.w", "a", "model.layers.3.w", 1, 2),
        (NORM, "a", NORM, 0, 2),
    ]


def test_what_lies_outside_of_the_layers_goes_with_the_first_and_the_last_slice() -> None:
    config = sliced("linear", {"a": (0, 1), "b": (1, 2)}, {"b": (0, 1), "c": (1, 2)})
    sources = found(config, {spec: names(0, 1) for spec in "abc"}, "a")
    assert [[spec for spec, _ in source.models] for source in sources] == [["a", "b"]] * 2 + [["b", "c"]] * 2
    assert sources[1].models == (("a", "model.layers.0.w"), ("b", "model.layers.1.w"))
    based = sliced("task_arithmetic", {"a": (0, 1), "base": (1, 2)}, base="base")
    layer = found(based, {spec: names(0, 1) for spec in ("a", "base")}, "base")[1]
    assert (layer.base, layer.models) == (("base", "model.layers.1.w"), (("a", "model.layers.0.w"),))


STACKS = {"encoder.layers.0.w": None, "decoder.layers.0.w": None}


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        ({"a": names(0)}, "missing_layer", {"model": "a", "layer": 1}),
        ({"b": names() | {"model.layers.1.v": None}}, "missing_tensor", {"tensor": "model.layers.1.w"}),
        (
            {"b": {EMBEDDING: None, "model.layers.1.w": None}},
            "missing_tensor",
            {"tensor": NORM, "model": "b"},
        ),
        ({"a": STACKS, "b": STACKS}, "ambiguous_stack", {}),
        ({"a": {f"encoder.stages.{i}.layers.0.w": None for i in range(2)}}, "layers_in_stages", {}),
        ({"a": {f"encoder.layers.{i}.blocks.1.w": None for i in range(2)}}, "layers_in_stages", {}),
    ],
)
def test_slices_refused(changes: dict[str, Any], code: str, fields: dict[str, Any]) -> None:
    tensors = {"a": names(0, 1), "b": names(0, 1)} | changes
    tensors["b"] = tensors["b"] if code != "missing_layer" else names(0)
    with raises_error(code, **fields):
        found(sliced("linear", {"a": (1, 2), "b": (1, 2)}), tensors, "a")


def test_slices_of_one_stack_of_several() -> None:
    """The text is cut, the images' layers go with the first slice at their own depths."""
    images, text = [
        [f"{stack}.layers.{{}}.w".format(i) for i in range(4)] for stack in ("vision_tower", "text")
    ]
    tensors = {"a": dict.fromkeys([*images[:3], *text, "norm.w"])}
    parts = {"a": (0, 2)}, {"a": (3, 4)}
    sources = found(sliced("passthrough", *parts, stack="text"), tensors, "a")
    assert [(source.output, source.models[0][1], source.depth, source.slice_index) for source in sources] == [
        (images[0], images[0], 0, 0),
        (images[1], images[1], 0.5, 0),
        (images[2], images[2], 1, 0),
        (text[0], text[0], 0, 0),
        (text[1], text[1], 1, 0),
        (text[2], text[3], 1, 1),
        ("norm.w", "norm.w", 0, 1),
    ]
    for word, code in (
        (None, "ambiguous_stack"),
        ("layers", "ambiguous_stack"),
        ("vision", "unsupported_stack"),
    ):
        with raises_error(code, model="a"):
            found(sliced("passthrough", *parts, stack=word), tensors, "a")
