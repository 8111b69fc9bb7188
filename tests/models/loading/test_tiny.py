"""The tokenizer and the models made on the spot."""

import pytest
import torch
from transformers import AutoTokenizer

from raises import raises_error
from rlhf_models.loading.tiny import TINY_ARCHITECTURES, build_tiny_llama, tiny_model, train_byte_tokenizer

ODD_TEXTS = [
    "",
    " ",
    "  two  spaces , and a tail ",
    "it 's n't .  \n\t\r\n x",
    "Zażółć gęślą jaźń — 東京 🤖\u200d🔥 \u0000\ufeff",
    "the text <eos> spells <pad> and <bos>",
]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_comes_back_exactly(byte_tokenizer, tmp_path, text):
    byte_tokenizer.save_pretrained(tmp_path)
    for tokenizer in (byte_tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer(text)["input_ids"]
        assert not set(ids) & set(tokenizer.all_special_ids)
        assert tokenizer.decode(ids) == text


def test_no_byte_is_unknown_and_the_special_ids_are_fixed(byte_tokenizer):
    assert byte_tokenizer.unk_token_id is None
    assert (byte_tokenizer.pad_token_id, byte_tokenizer.bos_token_id, byte_tokenizer.eos_token_id) == (
        0,
        1,
        2,
    )
    # A text of bytes never seen in training costs at most one token per byte.
    assert len(byte_tokenizer("東京")["input_ids"]) == len("東京".encode())


def test_training_merges_frequent_words(byte_tokenizer):
    assert len(byte_tokenizer) == 300
    assert len(byte_tokenizer(" to kitchen")["input_ids"]) < len(" to kitchen") / 2
    assert len(byte_tokenizer("xylophone")["input_ids"]) > len("xylophone") / 2


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    with raises_error("invalid_value", key="vocab_size"):
        train_byte_tokenizer(["text"], vocab_size=100)


def test_tiny_llama_is_seeded_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (build_tiny_llama(300, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [next(model.parameters()) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_tiny_llama_takes_sizes_and_token_ids():
    model = build_tiny_llama(
        300, hidden_size=32, num_layers=1, num_heads=2, max_positions=64, eos_token_id=2, pad_token_id=0
    )
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 1, 2)
    assert (config.max_position_embeddings, config.eos_token_id, config.pad_token_id) == (64, 2, 0)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.dtype == torch.float32 and not model.training


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_every_architecture_runs(architecture):
    model = tiny_model(architecture, vocab_size=70)
    assert model.config.model_type == architecture
    with torch.no_grad():
        logits = model(torch.arange(20)[None]).logits
    assert logits.shape == (1, 20, 70) and torch.isfinite(logits).all()


def test_an_unknown_architecture_names_the_known_ones():
    with pytest.raises(ValueError, match="gemma2, gpt2, llama"):
        tiny_model("lstm")
