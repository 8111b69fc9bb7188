"""What names of tensors say: layers and their depths, and which have a row for each token."""

from __future__ import annotations

import pytest
import torch

from rlhf_merge.methods.blocks import MemoryTensor
from rlhf_merge.names import (
    LayerName,
    depth_of,
    is_vocabulary_tensor,
    layer_counts,
    layer_name,
    vocabulary_rows,
)


@pytest.mark.parametrize(
    ("stack", "layer", "rest"),
    [
        ("model.layers.", 3, ".mlp.up.weight"),
        ("layers.", 10, ".w"),
        ("transformer.h.", 0, ".attn.c_attn.bias"),
        ("encoder.block.", 1, ".layer.0.w"),
        ("transformer.blocks.", 2, ".w"),
        ("bert.encoder.layer.", 5, ".w"),
        # The number of an expert is none of a layer.
        ("model.layers.", 4, ".mlp.experts.9.w1"),
        # A hierarchical model's stages are its layers: 4 stages of depth 0, 1/3, 2/3 and 1.
        ("resnet.encoder.stages.", 2, ".layers.1.w"),
        ("swin.encoder.layers.", 1, ".blocks.0.w"),
    ],
)
def test_layer_names(stack: str, layer: int, rest: str) -> None:
    assert layer_name(f"{stack}{layer}{rest}") == LayerName(stack, layer, rest)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "sublayers.3.w", "model.layers.norm.weight"])
def test_names_outside_of_layers(name: str) -> None:
    assert layer_name(name) is None


def test_depth() -> None:
    counts = layer_counts([f"encoder.block.{i}.w" for i in range(5)] + ["decoder.block.0.w", "shared.weight"])
    assert counts == {"encoder.block.": 5, "decoder.block.": 1}
    depths = {"encoder.block.0.w": 0.0, "encoder.block.1.v": 0.25, "encoder.block.4.w": 1.0}
    for name, depth in (depths | {"decoder.block.0.w": 1.0, "shared.weight": 0.0}).items():
        assert depth_of(name, counts) == depth


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.embed_tokens.weight", (10, 4), True),
        ("wte.weight", (10, 4), True),
        ("lm_head.bias", (10,), True),
        ("model.language_model.embed_tokens.weight", (10, 4), True),
        ("model.embed_tokens.weight", (11, 4), False),
        ("model.layers.0.self_attn.q_proj.weight", (10, 4), False),
        ("my_lm_head.weight", (10, 4), False),
    ],
)
def test_vocabulary_tensors_are_found_by_name_and_rows(
    name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert is_vocabulary_tensor(name, shape, 10) is expected
    assert not is_vocabulary_tensor(name, shape, None)


def test_the_rows_are_those_of_the_input_embedding() -> None:
    rows = {"lm_head.weight": 9, "model.position_embeddings.weight": 8, "model.embed_tokens.weight": 7}
    assert vocabulary_rows({name: MemoryTensor(torch.zeros(n, 2)) for name, n in rows.items()}) == 7
    assert vocabulary_rows({"encoder.weight": MemoryTensor(torch.zeros(3, 3))}) is None
