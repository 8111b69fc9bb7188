from __future__ import annotations

import copy
from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.errors import MergeError
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
NOTHING: dict[str, Any] = {
    "dtype": None,
    "vocab_size": None,
    "layer_sources": None,
    "tied": None,
}


def check(*configs: dict[str, Any], same_layers: bool = True) -> None:
    check_architectures([(f"m{i}", config) for i, config in enumerate(configs)], same_layers=same_layers)


def test_models_that_differ_in_vocabulary_dtype_and_tying_may_be_merged():
    check(LLAMA, {**LLAMA, "vocab_size": 128, "torch_dtype": "bfloat16", "tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mistral"),
        ("hidden_size", 32),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("intermediate_size", 96),
        ("hidden_act", "gelu"),
    ],
)
def test_another_size_or_architecture_is_refused(key: str, value: Any):
    with pytest.raises(MergeError) as caught:
        check(LLAMA, LLAMA, {**LLAMA, key: value})
    assert f"{key} {LLAMA[key]!r} in m0 but {value!r} in m2" in str(caught.value)


def test_the_number_of_layers_matters_only_without_slices():
    deeper = {**LLAMA, "num_hidden_layers": 6}
    check(LLAMA, deeper, same_layers=False)
    with raises_error("different_config", key="num_hidden_layers"):
        check(LLAMA, deeper)


def test_a_key_that_one_config_lacks_is_compared_between_the_others():
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    check(without, LLAMA, {**LLAMA, "head_dim": None})
    with raises_error("different_config", key="num_key_value_heads"):
        check(without, LLAMA, {**LLAMA, "num_key_value_heads": 1})


def test_the_language_model_of_several_modalities_is_compared():
    one = {"model_type": "gemma3", "text_config": {"hidden_size": 64}}
    with raises_error("different_config", key="text_config.hidden_size"):
        check(one, {"model_type": "gemma3", "text_config": {"hidden_size": 32}})


def test_a_quantized_model_is_refused():
    with raises_error("quantized_model"):
        check(LLAMA, {**LLAMA, "quantization_config": {"quant_method": "gptq"}})


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"rope_theta": 10000, "rope_scaling": None},
            {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        ),
        (
            {"rotary_emb_base": 10000, "rotary_pct": 0.25},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}},
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8},
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
        ),
        (
            {"rope_scaling": {"type": "su", "long_factor": [1.0, 2.0]}},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope", "long_factor": [1.0, 2.0]}},
        ),
    ],
    ids=["default", "llama3", "gpt_neox", "gemma3", "phi3"],
)
def test_old_and_new_spellings_of_the_rotary_embedding_are_equal(old: dict[str, Any], new: dict[str, Any]):
    check(old, new)
    check(new, old)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"rope_theta": 1e6}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type"),
        ({"rope_theta": 1e4, "rope_local_base_freq": 1e5}, "rope_theta of sliding_attention"),
    ],
)
def test_another_rotary_embedding_is_refused(other: dict[str, Any], key: str):
    full = {"rope_theta": 1e4, "rope_type": "default"}
    one = {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 10000}}}
    with raises_error("different_config", key=key):
        check(one, other)


def test_models_without_rotary_embeddings_have_none_to_compare():
    check({"model_type": "gpt2"}, {"model_type": "gpt2", "rope_theta": 1e4})


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
def test_whether_embeddings_are_tied(config: dict[str, Any], has_head: bool | None, expected: bool | None):
    assert tied(config, has_head=has_head) is expected


def test_the_config_is_kept_but_for_the_path_and_what_is_asked():
    before = copy.deepcopy(LLAMA)
    kept = {key: value for key, value in LLAMA.items() if key != "_name_or_path"}
    assert output_config(LLAMA, **NOTHING) == kept
    changed = output_config(
        LLAMA, dtype="bfloat16", vocab_size=101, layer_sources=[0, 1, 2, 3] * 2, tied=True
    )
    assert changed == {
        **kept,
        "torch_dtype": "bfloat16",
        "vocab_size": 101,
        "num_hidden_layers": 8,
        "tie_word_embeddings": True,
    }
    assert before == LLAMA


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float16", "torch_dtype": "float32"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
    ],
)
def test_the_dtype_is_set_under_the_key_in_use(given: dict[str, Any], expected: dict[str, Any]):
    assert output_config(given, **{**NOTHING, "dtype": "bfloat16"}) == expected


def test_a_language_model_inside_is_changed_where_its_settings_are():
    text = {"vocab_size": 100, "num_hidden_layers": 2, "torch_dtype": "float32", "layer_types": ["x", "y"]}
    config = {"text_config": text, "vision_config": {"num_hidden_layers": 9}, "tie_word_embeddings": True}
    result = output_config(config, dtype="float16", vocab_size=110, layer_sources=[0, 1, 1], tied=False)
    assert result == {
        "text_config": {
            "vocab_size": 110,
            "num_hidden_layers": 3,
            "torch_dtype": "float16",
            "layer_types": ["x", "y", "y"],
        },
        "vision_config": {"num_hidden_layers": 9},
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }


def test_tying_is_said_of_the_whole_model_and_of_the_language_model_inside():
    result = output_config({"text_config": {"tie_word_embeddings": True}}, **{**NOTHING, "tied": False})
    assert result == {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}}


def test_a_vocabulary_size_left_to_the_default_goes_to_the_language_model():
    result = output_config({"text_config": {"hidden_size": 8}}, **{**NOTHING, "vocab_size": 110})
    assert result == {"text_config": {"hidden_size": 8, "vocab_size": 110}}


def test_gpt2_counts_its_layers_under_its_own_key():
    assert output_config({"n_layer": 2}, **{**NOTHING, "layer_sources": [0, 1, 0, 1, 0]}) == {"n_layer": 5}


def moved(config: dict[str, Any], sources: list[int]) -> dict[str, Any]:
    layers = {**NOTHING, "layer_sources": sources}
    result = output_config({"num_hidden_layers": 4, **config}, **layers)
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
        (
            {"use_sliding_window": False, "max_window_layers": 2},
            {"use_sliding_window": False, "max_window_layers": 2},
        ),
        ({"suppress_tokens": [1, 2, 3, 4]}, {"suppress_tokens": [1, 2, 3, 4]}),
    ],
)
def test_per_layer_settings_follow_the_layers(config: dict[str, Any], expected: dict[str, Any]):
    assert moved(config, [0, 1, 1, 2, 3]) == expected


def test_layers_in_their_old_order_change_nothing():
    assert moved({"first_k_dense_replace": 1, "layer_types": list("abcd")}, [0, 1, 2, 3]) == {
        "first_k_dense_replace": 1,
        "layer_types": list("abcd"),
    }


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
):
    with raises_error(code, key=key):
        moved(config, sources)


def test_a_pattern_is_free_where_a_list_replaces_it_or_the_order_keeps_it():
    assert moved({"sliding_window_pattern": 2}, [0, 1, 0, 1]) == {"sliding_window_pattern": 2}
    given = {"sliding_window_pattern": 2, "layer_types": list("abcd")}
    assert moved(given, [0, 0]) == {"sliding_window_pattern": 2, "layer_types": ["a", "a"]}


def test_special_tokens_come_with_the_tokenizer():
    other = {"eos_token_id": 5, "pad_token_id": 6, "hidden_size": 1}
    result = output_config(LLAMA, **NOTHING, token_ids_from=other)
    assert (result["eos_token_id"], result["pad_token_id"], result["hidden_size"]) == (5, 6, 64)


def test_a_special_token_that_is_cut_off_is_refused():
    with raises_error("token_id_out_of_range", key="eos_token_id"):
        output_config(LLAMA, **{**NOTHING, "vocab_size": 91})
    cut = output_config(LLAMA, **{**NOTHING, "vocab_size": 91}, token_ids_from={"eos_token_id": 3})
    assert cut["eos_token_id"] == 3
