"""config.json: what must agree between models, and what that of the result says."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.files.config_json import check_architectures, output_config, tied

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "hidden_act": "silu",
    "vocab_size": 100,
    "eos_token_id": [90, 91],
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "_name_or_path": "somewhere/else",
}


def check(*configs: dict[str, Any], same_layers: bool = True) -> None:
    check_architectures([(f"m{i}", config) for i, config in enumerate(configs)], same_layers=same_layers)


def changed(config: dict[str, Any], **asked: Any) -> dict[str, Any]:
    """The result's config where nothing but this is asked."""
    nothing = dict.fromkeys(("dtype", "vocab_size", "layer_sources", "tied"))
    return output_config(config, **(nothing | asked))


WITHOUT = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}


@pytest.mark.parametrize(
    "configs",
    [
        (LLAMA, LLAMA | {"vocab_size": 128, "torch_dtype": "bfloat16", "tie_word_embeddings": True}),
        (WITHOUT, LLAMA, LLAMA | {"head_dim": None}),  # what one leaves to the default is not compared
        ({"model_type": "gpt2"}, {"model_type": "gpt2", "rope_theta": 1e4}),
    ],
)
def test_models_that_may_be_merged(configs: tuple[dict[str, Any], ...]) -> None:
    check(*configs)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mistral"),
        ("hidden_size", 32),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("intermediate_size", 96),
        ("hidden_act", "gelu"),
        ("num_hidden_layers", 6),
    ],
)
def test_another_size_or_architecture_is_refused(key: str, value: Any) -> None:
    with raises_error("different_config", key=key):
        check(LLAMA, LLAMA, LLAMA | {key: value})
    with raises_error("different_config", key=f"text_config.{key}"):
        check({"text_config": LLAMA}, {"text_config": LLAMA | {key: value}})
    if key == "num_key_value_heads":
        with raises_error("different_config", key=key):
            check(WITHOUT, LLAMA, LLAMA | {key: value})


def test_the_number_of_layers_matters_only_without_slices() -> None:
    check(LLAMA, LLAMA | {"num_hidden_layers": 6}, same_layers=False)


def test_a_quantized_model_is_refused() -> None:
    with raises_error("quantized_model"):
        check(LLAMA, LLAMA | {"quantization_config": {"quant_method": "gptq"}})


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 10000, "rope_scaling": None}, {"rope_theta": 10000.0, "rope_type": "default"}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
            {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3},
        ),
        (
            {"rotary_emb_base": 10000, "rotary_pct": 0.25},
            {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8},
            },
            {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        ),
        (
            {"rope_scaling": {"type": "su", "long_factor": [1.0, 2.0]}},
            {"rope_theta": 1e4, "rope_type": "longrope", "long_factor": [1.0, 2.0]},
        ),
    ],
    ids=["default", "llama3", "gpt_neox", "gemma3", "phi3"],
)
def test_old_and_new_spellings_of_the_rotary_embedding_are_equal(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    check(old, {"rope_parameters": new}, old)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"rope_theta": 1e6}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type"),
        ({"rope_theta": 1e4, "rope_local_base_freq": 1e5}, "rope_theta of sliding_attention"),
    ],
)
def test_another_rotary_embedding_is_refused(other: dict[str, Any], key: str) -> None:
    full = {"rope_theta": 1e4, "rope_type": "default"}
    one = {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 10000}}}
    with raises_error("different_config", key=key):
        check(one, other)


@pytest.mark.parametrize(
    ("config", "has_head", "expected"),
    [
        ({"tie_word_embeddings": True}, True, True),
        ({"tie_word_embeddings": False}, False, False),
        ({"text_config": {"tie_word_embeddings": True}}, None, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, None, False),
        ({}, None, None),
        ({}, True, False),
        ({}, False, True),
    ],
)
def test_whether_embeddings_are_tied(
    config: dict[str, Any], has_head: bool | None, expected: bool | None
) -> None:
    assert tied(config, has_head=has_head) is expected


def test_the_config_is_kept_but_for_the_path_and_what_is_asked() -> None:
    before = copy.deepcopy(LLAMA)
    kept = {key: value for key, value in LLAMA.items() if key != "_name_or_path"}
    assert changed(LLAMA) == kept
    asked = changed(LLAMA, dtype="bfloat16", vocab_size=101, layer_sources=[0, 1, 2, 3] * 2, tied=True)
    others = {
        "torch_dtype": "bfloat16",
        "vocab_size": 101,
        "num_hidden_layers": 8,
        "tie_word_embeddings": True,
    }
    assert asked == kept | others and before == LLAMA


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "float16"}, {"dtype": "float16"}),
        ({"torch_dtype": "float32"}, {"dtype": "float16"}, {"torch_dtype": "float16"}),
        ({"dtype": 1, "torch_dtype": 2}, {"dtype": "half"}, {"dtype": "half", "torch_dtype": "half"}),
        ({}, {"dtype": "float16"}, {"torch_dtype": "float16"}),
        ({"n_layer": 2}, {"layer_sources": [0, 1, 0, 1, 0]}, {"n_layer": 5}),
        # What is left to the default goes to the language model inside; tying, to the whole model too.
        ({"text_config": {"n": 8}}, {"vocab_size": 9}, {"text_config": {"n": 8, "vocab_size": 9}}),
        (
            {"text_config": {"tie_word_embeddings": True}},
            {"tied": False},
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}},
        ),
    ],
)  # fmt: skip
def test_a_setting_is_changed_where_it_is(
    config: dict[str, Any], asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert changed(config, **asked) == expected


def test_a_language_model_inside_is_changed_where_its_settings_are() -> None:
    text = {"vocab_size": 100, "num_hidden_layers": 2, "torch_dtype": "float32", "layer_types": ["x", "y"]}
    vision = {"vision_config": {"num_hidden_layers": 9}}
    config = {"text_config": text, "tie_word_embeddings": True} | vision
    result = changed(config, dtype="float16", vocab_size=110, layer_sources=[0, 1, 1], tied=False)
    text |= {
        "vocab_size": 110,
        "num_hidden_layers": 3,
        "torch_dtype": "float16",
        "layer_types": ["x", "y", "y"],
    }
    expected = {"text_config": text, "tie_word_embeddings": False, "torch_dtype": "float16"}
    assert result == expected | vision


def moved(config: dict[str, Any], sources: list[int]) -> dict[str, Any]:
    result = changed({"num_hidden_layers": 4, **config}, layer_sources=sources)
    assert result.pop("num_hidden_layers") == len(sources)
    return result


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"layer_types": ["f", "s", "f", "s"]}, {"layer_types": ["f", "s", "s", "f", "s"]}),
        ({"no_rope_layers": [1, 1, 1, 0]}, {"no_rope_layers": [1, 1, 1, 1, 0]}),
        # Layer 1 is at places 1 and 2, layer 3 at place 4.
        ({"mlp_only_layers": [1, 3]}, {"mlp_only_layers": [1, 2, 4]}),
        ({"per_layer_config": {"1": {"w": 5}}}, {"per_layer_config": {"1": {"w": 5}, "2": {"w": 5}}}),
        ({"first_k_dense_replace": 2}, {"first_k_dense_replace": 3}),
        *[({"max_window_layers": 2},) * 2, ({"suppress_tokens": [1, 2, 3, 4]},) * 2],
    ],
)  # fmt: skip
def test_per_layer_settings_follow_the_layers(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert moved(config, [0, 1, 1, 2, 3]) == expected


def test_orders_that_keep_the_kinds_of_layers_change_nothing() -> None:
    whole = {"first_k_dense_replace": 1, "layer_types": list("abcd")}
    assert moved(whole, [0, 1, 2, 3]) == whole
    period = {"sliding_window_pattern": 2}
    assert moved(period, [0, 1, 0, 1]) == period
    assert moved(period | {"layer_types": list("abcd")}, [0, 0]) == period | {"layer_types": ["a", "a"]}


@pytest.mark.parametrize(
    ("config", "sources", "code", "key"),
    [
        ({"layer_types": list("abcd")}, [0, 4], "missing_layer", "layer_types"),
        ({"first_k_dense_replace": 1}, [0, 1, 0], "unsupported_slices", "first_k_dense_replace"),
        ({"sliding_window_pattern": 2}, [0, 1, 1], "unsupported_slices", "sliding_window_pattern"),
        ({"is_encoder_decoder": True}, [0], "unsupported_slices", "is_encoder_decoder"),
    ],
)
def test_an_order_that_config_json_cannot_express_is_refused(
    config: dict[str, Any], sources: list[int], code: str, key: str
) -> None:
    with raises_error(code, key=key):
        moved(config, sources)


def test_special_tokens_come_with_the_tokenizer_and_must_have_a_row() -> None:
    other = {"eos_token_id": 5, "pad_token_id": 6, "hidden_size": 1}
    result = changed(LLAMA, token_ids_from=other)
    assert (result["eos_token_id"], result["pad_token_id"], result["hidden_size"]) == (5, 6, 64)
    with raises_error("token_id_out_of_range", key="eos_token_id"):
        changed(LLAMA, vocab_size=91)
    assert changed(LLAMA, vocab_size=91, token_ids_from={"eos_token_id": 3})["eos_token_id"] == 3
