"""Tokenizers whose files are missing, and unusual ones that are whole."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from raises import raises_error
from rlhf_models import load_tokenizer, tiny_model


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2", "qwen3"])
@pytest.mark.parametrize("kept", [(), ("tokenizer_config.json",)])
def test_a_vocabulary_that_transformers_makes_up_is_refused(
    tmp_path: Path, byte_tokenizer: Any, architecture: str, kept: tuple[str, ...]
) -> None:
    """Its tokenizer has special tokens only, and turns every text into no ids at all."""
    tiny_model(architecture, vocab_size=len(byte_tokenizer)).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    own = {"gpt2": "GPT2Tokenizer"}.get(architecture, "Qwen2Tokenizer")
    tool = {"content": "<tool_call>", "special": False}
    added = {"added_tokens_decoder": {"7": tool}} if own == "Qwen2Tokenizer" else {}
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": own, **added}))
    for path in tmp_path.glob("*token*"):
        if path.name not in kept:
            path.unlink()
    with raises_error("no_tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("words", [["12", "1", "2"], ["小", "林"]])
@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_a_vocabulary_of_few_words_is_one(tmp_path: Path, words: list[str], unknown: str | None) -> None:
    special = ["<eos>", *([unknown] if unknown else [])]
    places = {word: i for i, word in enumerate(special + words)}
    inner = Tokenizer(models.WordLevel(places, **({"unk_token": unknown} if unknown else {})))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"unk_token": unknown} if unknown else {}
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", **named).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)(words[0])["input_ids"] == [places[words[0]]]
