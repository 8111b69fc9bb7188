"""Damaged weights and tokenizers are refused, when they are loaded and before."""

import json

import pytest

from raises import raises_error
from rlhf_data import write_checksums
from rlhf_models import (
    LoraSettings,
    add_adapters,
    load_causal_lm,
    load_tokenizer,
)
from rlhf_models.adapters.files import adapter_tensors, save_adapter
from rlhf_models.loading import sources
from rlhf_models.loading.pretrained import check_weights
from rlhf_models.loading.sources import check_whole


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_weights_and_tokenizer_with_checksums_are_used_only_if_they_are_whole(tiny_model_folder, monkeypatch):
    flip(tiny_model_folder / "model.safetensors")
    load_causal_lm(tiny_model_folder)  # most models come without checksums
    write_checksums(tiny_model_folder)
    (tiny_model_folder / "generation_config.json").write_text("{}")  # as it may be edited
    load_causal_lm(tiny_model_folder)
    flip(tiny_model_folder / "model.safetensors")
    with raises_error("damaged_model"):
        load_causal_lm(tiny_model_folder)
    assert load_tokenizer(tiny_model_folder)
    (tiny_model_folder / "tokenizer.json").unlink()
    with raises_error("damaged_model"):
        load_tokenizer(tiny_model_folder)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")  # the first process looks
        load_causal_lm(tiny_model_folder)


@pytest.mark.parametrize("text", ["", "{", '{"files": {"model.safetensors": {"size": 3, "crc3'])
def test_a_list_of_checksums_that_cannot_be_read_is_damage(tiny_model_folder, text):
    (tiny_model_folder / "checksums.json").write_text(text)
    for check in (check_whole, load_causal_lm, load_tokenizer):
        with raises_error("damaged_model"):
            check(tiny_model_folder)


@pytest.mark.parametrize("text", ["[]", '{"sha256": "a"}', '{"files": {"model.safetensors": "a"}}'])
def test_another_programs_checksums_say_nothing(tiny_model_folder, text):
    (tiny_model_folder / "checksums.json").write_text(text)
    check_whole(tiny_model_folder)
    load_causal_lm(tiny_model_folder)


def test_damage_shows_without_loading(tiny_model_folder, tmp_path, monkeypatch):
    weights = tiny_model_folder / "model.safetensors"
    whole = weights.read_bytes()
    write_checksums(tiny_model_folder)
    check_whole(tiny_model_folder)
    flip(weights)
    with raises_error("damaged_model"):
        check_weights(tiny_model_folder)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "READ_UP_TO", 1000)
        check_whole(tiny_model_folder)  # large files are not read
        weights.write_bytes(whole[:-1])
        with raises_error("damaged_model"):
            check_whole(tiny_model_folder)
    (tiny_model_folder / "checksums.json").unlink()
    for damaged in (whole[:-1], whole + b"x", b"", whole[:8] + b"}" + whole[9:]):
        weights.write_bytes(damaged)
        with raises_error("unreadable_weights"):
            check_whole(tiny_model_folder)
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(tiny_model_folder)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with raises_error("unreadable_weights"):
        check_whole(tmp_path / "adapter")
    weights.rename(tiny_model_folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (tiny_model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises_error("unreadable_weights"):
        check_whole(tiny_model_folder)


def test_an_adapter_with_checksums_is_used_only_if_it_is_whole(tiny_llama, tmp_path):
    save_adapter(add_adapters(tiny_llama, ["default"], LoraSettings()), tmp_path / "adapter")
    write_checksums(tmp_path / "adapter")
    assert adapter_tensors(tmp_path / "adapter")
    flip(tmp_path / "adapter" / "adapter_model.safetensors")
    with raises_error("damaged_model"):
        adapter_tensors(tmp_path / "adapter")
