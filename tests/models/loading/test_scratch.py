"""Models from scratch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from raises import raises_error
from rlhf_data import TokenSequence, UserError, pack
from rlhf_models import ModelConfig, RewardModel, build_model, build_tokenizer, load_model_config, token_logps
from rlhf_models.loading.pretrained import load_causal_lm, save_model
from rlhf_models.loading.tokenizers import load_tokenizer

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = ("model_config.yaml", "model_config_llama.yaml")
SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_length": 64}
TEXTS = ["mary went to kitchen . where is mary ?", "gossip says in garden ."]


@pytest.mark.parametrize("file", FILES)
def test_the_shipped_files_name_every_key_and_build(file):
    config = load_model_config(CONFIGS / file)
    missing = set(ModelConfig.model_fields) - config.model_fields_set
    assert missing == (
        {"num_key_value_heads", "rope_theta"} if config.architecture == "gpt2" else {"tokenizer_characters"}
    )
    tokenizer = build_tokenizer(config, TEXTS)
    model = build_model(config, tokenizer=tokenizer)
    shape: Any = model.config
    assert shape.vocab_size == config.vocab_size and shape.vocab_size >= len(tokenizer)
    assert (shape.hidden_size, shape.num_hidden_layers) == (config.hidden_size, config.num_layers)
    assert model.num_parameters() < 10_000_000


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_model_from_scratch_scores_packed_as_plain_and_comes_back(architecture, tmp_path):
    config = SMALL | {"architecture": architecture, "initializer_range": 0.2}
    tokenizer = build_tokenizer(config, TEXTS)
    model = build_model(config, tokenizer=tokenizer, seed=1)
    assert model.config._attn_implementation == "rlhf_packed" and not model.training
    save_model(model, tokenizer, tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    rows = [tokenizer(text)["input_ids"] for text in (TEXTS[0], TEXTS[0][:20] + " x", TEXTS[1])]
    (batch,) = pack([TokenSequence(ids, 1) for ids in rows])
    expected = []
    for i in batch.sequence_ids.tolist():
        ids = torch.tensor([rows[i]])
        with torch.no_grad():
            logps = plain(ids).logits[0, :-1].log_softmax(-1)
        expected.append(logps.gather(1, ids[0, 1:, None])[:, 0])
    torch.testing.assert_close(token_logps(model, batch).logps, torch.cat(expected), rtol=1e-4, atol=1e-5)
    again = load_causal_lm(tmp_path / "model")
    assert torch.equal(token_logps(again, batch).logps, token_logps(model, batch).logps)
    assert load_tokenizer(tmp_path / "model")(TEXTS[0])["input_ids"] == rows[0]
    assert RewardModel.from_backbone(model, tokenizer).score(["mary"], [" went"]).shape == (1,)


def test_every_setting_reaches_the_model(byte_tokenizer):
    common = {"vocab_size": 320, "dropout": 0.25, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-4}
    gpt2: Any = build_model(
        SMALL | common | {"intermediate_size": 48, "activation_function": "relu"}, tokenizer=byte_tokenizer
    ).config
    assert (gpt2.n_embd, gpt2.n_layer, gpt2.n_head, gpt2.n_inner, gpt2.n_positions) == (32, 2, 4, 48, 64)
    assert (gpt2.embd_pdrop, gpt2.attn_pdrop, gpt2.resid_pdrop) == (0.25, 0.25, 0.25)
    assert (gpt2.activation_function, gpt2.layer_norm_epsilon, gpt2.vocab_size) == ("relu", 1e-4, 320)
    assert not gpt2.tie_word_embeddings
    assert (gpt2.pad_token_id, gpt2.bos_token_id, gpt2.eos_token_id) == (0, 1, 2)
    llama: Any = build_model(
        SMALL
        | common
        | {"architecture": "llama", "num_key_value_heads": 2, "rope_theta": 5e5, "initializer_range": 0.5},
        tokenizer=byte_tokenizer,
    )
    shape = llama.config
    assert (shape.num_key_value_heads, shape.intermediate_size, shape.attention_dropout) == (2, 128, 0.25)
    assert (shape.rms_norm_eps, shape.rope_parameters["rope_theta"]) == (1e-4, 5e5)
    assert llama.model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(0.5, rel=0.1)


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone(byte_tokenizer):
    state = torch.get_rng_state()
    first, again, other = (build_model(SMALL, tokenizer=byte_tokenizer, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    weights: list[Any] = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert len(weights[0]) == len(byte_tokenizer)


def test_names_of_gpt2_and_llama_and_a_model_section_are_read(tmp_path):
    expected = ModelConfig(hidden_size=64, num_layers=3, num_heads=2, max_seq_length=99, intermediate_size=80)
    gpt2 = {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 99, "n_inner": 80}
    llama = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    llama |= {"max_position_embeddings": 99, "intermediate_size": 80}
    for values in (gpt2, llama, {"model": gpt2 | {"model_type": "gpt2"}}):
        assert load_model_config(values) == expected
    (tmp_path / "model.json").write_text('{"model": {"n_embd": 64, "attn_pdrop": 0.1}}')
    assert load_model_config(tmp_path / "model.json") == ModelConfig(hidden_size=64, dropout=0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hiden_size": 3}, "unknown key hiden_size; did you mean hidden_size"),
        ({"learning_rate": 1e-3}, "unknown key learning_rate; valid keys are"),
        ({"model": {"n_layer": 2}, "training": {}, "sft": {}}, "sft, training beside the section model"),
        ({"n_embd": 64, "hidden_size": 64}, "n_embd and hidden_size mean the same"),
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of num_heads 4"),
        ({"num_layers": 0}, "num_layers is 0, expected a value >= 1"),
        ({"dropout": 1.0}, "dropout is 1.0, expected a value"),
        ({"architecture": "bert"}, "architecture is 'bert', expected 'gpt2' or 'llama'"),
        ({"activation_function": "gelu_nwe"}, "did you mean gelu_new"),
        ({"rope_theta": 1e4}, "rope_theta is set, which architecture gpt2 has not"),
        ({"architecture": "llama", "num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"architecture": "llama", "hidden_size": 20}, "is 5, and rotary positions need an even number"),
        ({"vocab_size": 100}, "vocab_size 100 is too small"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(UserError, match=message):
        load_model_config(values)


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    (tmp_path / "m.yaml").write_text("n_heads: 3\n")
    with raises_error("unknown_key", key="n_heads"):
        load_model_config(tmp_path / "m.yaml")


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(byte_tokenizer):
    with raises_error("tokenizer_does_not_fit"):
        build_model(SMALL | {"vocab_size": 280}, tokenizer=byte_tokenizer)


def test_tokenizers_are_trained_or_named(tiny_model_folder):
    trained = build_tokenizer({"vocab_size": 270}, TEXTS)
    assert len(trained) == 270 and trained.decode(trained("Żółw .")["input_ids"]) == "Żółw ."
    few = build_tokenizer({"vocab_size": 400, "tokenizer_characters": 4}, iter(TEXTS))
    assert len(few) < len(build_tokenizer({"vocab_size": 400}, TEXTS)) < 400
    named = build_tokenizer({"tokenizer": str(tiny_model_folder)})
    assert len(named) == 300
    with raises_error("model_not_found"):
        build_tokenizer({"tokenizer": "./nowhere"})
