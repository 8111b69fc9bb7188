"""Layers and kinds of tensors, by the names that real models have for them."""

from __future__ import annotations

import pytest

from rlhf_merge.compare.kinds import ordered_kinds, ordered_rows, place_tensors

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
