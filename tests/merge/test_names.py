"""What names of tensors say: layers, their depths, kinds in real models, and rows for each token."""

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
    ordered_kinds,
    ordered_rows,
    place_tensors,
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


LLAMA, GPT2, BERT, T5 = (
    "model.layers.7.",
    "transformer.h.7.",
    "bert.encoder.layer.7.",
    "decoder.block.7.layer.",
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{LLAMA}self_attn.q_proj.weight", "attn.q"),
        (f"{LLAMA}self_attn.q_proj.bias", "attn.q"),
        (f"{LLAMA}self_attn.qkv_proj.weight", "attn.qkv"),
        (f"{LLAMA}self_attn.o_proj.weight", "attn.o"),
        (f"{LLAMA}self_attn.q_norm.weight", "norm"),
        (f"{LLAMA}self_attn.kv_b_proj.weight", "attn.kv_b_proj"),
        (f"{LLAMA}post_attention_layernorm.weight", "norm"),
        (f"{LLAMA}mlp.gate_proj.weight", "mlp.gate"),
        (f"{LLAMA}mlp.experts.31.down_proj.weight", "mlp.down"),
        (f"{LLAMA}mlp.experts.gate_up_proj", "mlp.gate_up"),
        (f"{LLAMA}mlp.gate.weight", "mlp.router"),
        (f"{LLAMA}block_sparse_moe.experts.0.w1.weight", "mlp.gate"),
        (f"{LLAMA}block_sparse_moe.gate.weight", "mlp.router"),
        (f"{LLAMA}mixer.in_proj.weight", "mixer.in_proj"),
        (f"{LLAMA}mixer.A_log", "mixer.A_log"),
        (f"{GPT2}attn.c_attn.weight", "attn.qkv"),
        (f"{GPT2}attn.c_proj.bias", "attn.o"),
        (f"{GPT2}mlp.c_fc.weight", "mlp.up"),
        (f"{GPT2}mlp.c_proj.weight", "mlp.down"),
        (f"{GPT2}ln_1.weight", "norm"),
        (f"{BERT}attention.self.query.weight", "attn.q"),
        (f"{BERT}attention.output.dense.weight", "attn.o"),
        (f"{BERT}intermediate.dense.weight", "mlp.up"),
        (f"{BERT}output.dense.weight", "mlp.down"),
        (f"{T5}0.SelfAttention.k.weight", "attn.k"),
        (f"{T5}1.EncDecAttention.v.weight", "cross.v"),
        (f"{T5}2.DenseReluDense.wo.weight", "mlp.down"),
        ("model.decoder.layers.7.fc1.weight", "mlp.up"),
        ("gpt_neox.layers.7.attention.query_key_value.weight", "attn.qkv"),
        ("gpt_neox.layers.7.mlp.dense_4h_to_h.weight", "mlp.down"),
    ],
)
def test_kinds_in_layers(name: str, kind: str) -> None:
    place = place_tensors([name])[name]
    assert (place.row, place.kind, place.in_layer) == ("7", kind, True)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wpe.weight", "embedding"),
        ("shared.weight", "embedding"),
        ("embeddings.LayerNorm.weight", "norm"),
        ("model.norm.weight", "norm"),
        ("transformer.ln_f.bias", "norm"),
        ("lm_head.weight", "head"),
        ("gpt_neox.embed_out.weight", "head"),
        ("classifier.bias", "head"),
        ("multi_modal_projector.linear_1.weight", "other"),
    ],
)
def test_rows_outside_of_the_layers(name: str, row: str) -> None:
    place = place_tensors([name])[name]
    assert (place.row, place.kind, place.in_layer) == (row, row, False)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("self_attn.q_proj", "attention"),
        ("encoder_attn.q_proj", "attention"),
        ("mlp.up_proj", "mlp"),
        ("input_layernorm", "norm"),
        ("conv", "other"),
    ],
)
def test_families(kind: str, family: str) -> None:
    name = f"layers.0.{kind}.weight"
    assert place_tensors([name])[name].family == family


def test_rows_are_ordered_from_the_embedding_to_the_head() -> None:
    layers = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (10, 2, 1)]
    names = ["lm_head.weight", "projector.weight", "model.norm.weight", *layers, "model.embed_tokens.weight"]
    rows = ordered_rows(place_tensors(names).values())
    assert rows == ["embedding", "1", "2", "10", "norm", "other", "head"]


@pytest.mark.parametrize(
    ("stacks", "rows"),
    [
        (["decoder.block.", "encoder.block."], ["encoder 0", "decoder 0"]),
        (
            ["model.vision_tower.encoder.layers.", "model.language_model.layers."],
            ["vision_tower.encoder 0", "language_model 0"],
        ),
        (["encoder.layers.", "layers."], ["encoder.layers 0", "layers 0"]),
    ],
)
def test_stacks_of_layers_are_told_apart(stacks: list[str], rows: list[str]) -> None:
    names = [f"{stack}0.fc1.weight" for stack in stacks]
    assert ordered_rows(place_tensors(names).values()) == rows


def test_kinds_are_ordered_attention_first_and_norms_last() -> None:
    tails = ["input_layernorm", "mlp.down_proj", "conv", "mlp.up_proj", "self_attn.sinks", "self_attn.k_proj"]
    places = place_tensors([*(f"layers.0.{tail}.weight" for tail in tails), "lm_head.weight"])
    kinds = ["attn.k", "attn.sinks", "mlp.up", "mlp.down", "conv", "norm"]
    assert ordered_kinds(places.values()) == kinds
