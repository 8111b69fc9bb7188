"""Whether texts and tokenizers fit a model."""

import copy
import json

import pytest
from safetensors.torch import load_file, save_file

from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models import (
    check_files,
    check_prompt_fits,
    context_length,
    encode_prompt,
    load_causal_lm,
    tiny_model,
    token_logps,
)
from rlhf_models.loading.fits import check_tokenizer_fits


def test_a_prompt_longer_than_the_context_is_refused(tiny_llama):
    assert context_length(tiny_llama) == 512
    assert context_length(tiny_model("gpt2")) == 128
    check_prompt_fits(tiny_llama, 512, "the prompt")
    with raises_error("context_too_short", length=513, limit=512):
        check_prompt_fits(tiny_llama.config, 513, "the prompt of row 3")


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(byte_tokenizer):
    with raises_error("tokenizer_does_not_fit"):
        check_tokenizer_fits(tiny_model("llama", vocab_size=299), byte_tokenizer)


def test_a_special_token_without_an_embedding_is_refused_only_where_it_is_used(byte_tokenizer):
    """Gemma 3 of 1B has a token for images, one more than embeddings."""
    tokenizer, model = copy.deepcopy(byte_tokenizer), tiny_model("llama", vocab_size=len(byte_tokenizer))
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    check_tokenizer_fits(model, tokenizer)
    assert max(encode_prompt(tokenizer, "an <image>")) < len(
        byte_tokenizer
    )  # no text is read as a special token
    ids = [5, tokenizer.convert_tokens_to_ids("<image>")]
    (batch,) = pack([TokenSequence(ids, 1)])
    with raises_error("unknown_token"):
        token_logps(model, batch)
    tokenizer.pad_token = "<image>"
    with raises_error("tokenizer_does_not_fit"):
        check_tokenizer_fits(model, tokenizer)
    plain = copy.deepcopy(byte_tokenizer)
    plain.add_tokens(["<image>"])
    with raises_error("tokenizer_does_not_fit"):
        check_tokenizer_fits(model, plain)


@pytest.mark.parametrize("code", ["missing_weights", "unreadable_weights", "is_a_reward_model", None])
def test_files_that_make_no_whole_language_model_are_refused(code, tiny_model_folder, tmp_path):
    tensors = load_file(tiny_model_folder / "model.safetensors")
    config = json.loads((tiny_model_folder / "config.json").read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    if code == "missing_weights":
        del tensors[name]
    elif code == "unreadable_weights":
        tensors[name] = tensors[name][:-1].clone()
    elif code == "is_a_reward_model":
        config["architectures"] = ["LlamaForSequenceClassification"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    if code is None:
        check_files(tmp_path)
    else:
        with raises_error(code):
            check_files(tmp_path)


@pytest.mark.parametrize("load", [check_files, load_causal_lm])
@pytest.mark.parametrize(
    "changed", [["model.layers.0.mlp.up_proj.weight"], ["model.norm.weight", "model.embed_tokens.weight"]]
)
def test_the_first_tensor_of_another_shape_is_named(load, changed, tiny_model_folder):
    path = tiny_model_folder / "model.safetensors"
    tensors = load_file(path)
    name = min(changed)
    shape = list(tensors[name].shape)
    tensors |= {each: tensors[each][:-1].clone() for each in changed}
    save_file(tensors, path, metadata={"format": "pt"})
    found = [shape[0] - 1, *shape[1:]]
    with raises_error("unreadable_weights", tensor=name, stored=found, expected=shape):
        load(tiny_model_folder)
