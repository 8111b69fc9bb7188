from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raises import raises_error
from rlhf_merge.files.config_json import output_config
from rlhf_merge.files.small_files import copied_files, read_tokens, write_model_files
from rlhf_merge.files.weight_index import read_json
from rlhf_merge.vocab.union import ModelVocab, align

TEXT = "mary went to kitchen"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"from": folder.name}))
    return folder


def write(tmp_path: Path, config_from: Path, tokenizer_from: Path, **arguments: Any) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    values: dict[str, Any] = {"config": {"model_type": "llama"}, "added_tokens": None, **arguments}
    write_model_files(out, config_from=config_from, tokenizer_from=tokenizer_from, **values)
    return out


def source(path: Path) -> str:
    return read_json(path)["from"]


TOKENIZER = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/rag.jinja",
}
MODEL = {"preprocessor_config.json", "processor_config.json"}
LEFT = {
    "README.md",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "training_args.bin",
    "handler.py",
    "trainer_state.json",
}


def test_everything_beside_the_weights_is_copied_from_the_model_that_lends_it(tmp_path: Path):
    names = {"config.json", "generation_config.json", *TOKENIZER, *MODEL, *LEFT}
    base = fill(tmp_path / "base", *names)
    other = fill(tmp_path / "other", *names)
    out = write(tmp_path, base, other)
    assert files(out) == {"config.json", "generation_config.json", *TOKENIZER, *MODEL}
    assert {source(out / name) for name in MODEL} == {"base"}
    # Generation settings name token ids, so they go with the tokenizer.
    assert {source(out / name) for name in (*TOKENIZER, "generation_config.json")} == {"other"}
    assert read_json(out / "config.json") == {"model_type": "llama"}


def test_generation_settings_of_the_config_are_kept_where_the_tokenizers_model_has_none(tmp_path: Path):
    base = fill(tmp_path / "base", "generation_config.json")
    out = write(tmp_path, base, fill(tmp_path / "other", "tokenizer.json"))
    assert source(out / "generation_config.json") == "base"


def test_remote_code_is_copied(tmp_path: Path):
    base = fill(tmp_path / "base", "modeling_x.py", "shared.py")
    (base / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_x.Model"}}))
    other = fill(tmp_path / "other", "tokenization_x.py", "shared.py")
    (other / "tokenizer_config.json").write_text(json.dumps({"auto_map": {}}))
    out = write(tmp_path, base, other)
    assert {"modeling_x.py", "tokenization_x.py", "shared.py"} < files(out)
    assert source(out / "shared.py") == "base"


def test_links_into_a_cache_become_files_and_others_are_refused(tmp_path: Path):
    """A hub cache: snapshots/COMMIT/file -> ../../blobs/HASH."""
    base = fill(tmp_path / "hub" / "snapshots" / "c0", "config.json")
    blob = fill(tmp_path / "hub" / "blobs", "0123") / "0123"
    (base / "tokenizer.json").symlink_to("../../blobs/0123")
    (base / "vocab.json").symlink_to("tokenizer.json")
    out = write(tmp_path, base, base)
    assert not (out / "tokenizer.json").is_symlink()
    assert (out / "vocab.json").read_bytes() == (out / "tokenizer.json").read_bytes() == blob.read_bytes()
    secret = fill(tmp_path, "secret") / "secret"
    (base / "generation_config.json").symlink_to(secret)
    with raises_error("link_outside_folder"):
        copied_files(base, base)


@pytest.fixture
def specialised(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """The tiny model with two tokens of its own, one special, and rows for them."""
    from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer.add_tokens([AddedToken("kitchen", normalized=True)])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    folder = tmp_path / "specialised"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_union_loads_in_transformers(tmp_path: Path, tiny_model_folder: Path, specialised: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = read_json(tiny_model_folder / "config.json")
    rows = [config["vocab_size"], read_json(specialised / "config.json")["vocab_size"]]
    folders = (tiny_model_folder, specialised)
    models = [
        ModelVocab(folder.name, n, read_tokens(folder)) for folder, n in zip(folders, rows, strict=True)
    ]
    alignment = align("union", models, 0, tensor="model.embed_tokens.weight")
    assert alignment.rows == rows[0] + 2
    result = output_config(config, dtype="bfloat16", vocab_size=alignment.rows, layer_sources=None, tied=None)
    out = write(
        tmp_path, tiny_model_folder, tiny_model_folder, config=result, added_tokens=list(alignment.added)
    )
    weights = load_file(specialised / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )

    # The tiny tokenizer splits special tokens unless told not to.
    tokenizer = AutoTokenizer.from_pretrained(out, split_special_tokens=False)
    assert len(tokenizer) == alignment.rows
    for token in alignment.added:
        assert tokenizer.encode(token["content"], add_special_tokens=False) == [token["id"]]
    before = AutoTokenizer.from_pretrained(specialised, split_special_tokens=False)
    assert tokenizer.encode(f"{TEXT}<tool>") == before.encode(f"{TEXT}<tool>")
    assert tokenizer.decode([rows[0]], skip_special_tokens=True) == ""

    loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"].bfloat16())
    ids = torch.tensor([tokenizer.encode(f"{TEXT}<tool>")])
    assert model(ids).logits.shape == (1, ids.shape[1], alignment.rows)


def test_fewer_layers_load_in_transformers(tmp_path: Path, tiny_model_folder: Path):
    from transformers import AutoModelForCausalLM

    result = output_config(
        read_json(tiny_model_folder / "config.json"),
        dtype=None,
        vocab_size=None,
        layer_sources=[1],
        tied=None,
    )
    out = write(tmp_path, tiny_model_folder, tiny_model_folder, config=result)
    weights = load_file(tiny_model_folder / "model.safetensors")
    kept = {n.replace("layers.1.", "layers.0."): t for n, t in weights.items() if "layers.0." not in n}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(model.model.layers) == 1
    expected = weights["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected)


@pytest.mark.parametrize("decoder", [True, False], ids=["transformers 4", "transformers 5"])
def test_tokens_are_appended_to_a_tokenizer_with_a_class_of_its_own(tmp_path: Path, decoder: bool):
    from transformers import AutoTokenizer, GPT2Tokenizer

    base = tmp_path / "base"
    merges: Any = [("a", "b")]
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    GPT2Tokenizer(vocab=vocab, merges=merges).save_pretrained(base)
    listed = {"content": "<|endoftext|>", "special": True, "normalized": True}
    if decoder:
        settings = read_json(base / "tokenizer_config.json") | {"added_tokens_decoder": {"3": listed}}
        (base / "tokenizer_config.json").write_text(json.dumps(settings))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    out = write(tmp_path, base, base, added_tokens=[{"id": 4, "content": "<|im_start|>", **flags}])
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert type(tokenizer) is GPT2Tokenizer
    assert len(tokenizer) == 5
    assert tokenizer.encode("ab<|im_start|>a<|endoftext|>") == [2, 4, 0, 3]
