"""What is beside the weights: tokens that are read and appended, and files that are copied."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.files.folder import read_json
from rlhf_merge.files.tokenizer import TokenTable, append_tokens, copied_files, read_tokens, write_model_files


def added_token(i: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": i, "content": text, **flags}


def write(folder: Path, **contents: Any) -> None:
    """Write JSON files."""
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("model", [{"vocab": {"a": 0, "b": 1}}, {"vocab": [["a", 0.0], ["b", -1.5]]}])
def test_tokens_are_read_from_tokenizer_json(tmp_path: Path, model: dict[str, Any]) -> None:
    """An added token that is in the vocabulary has the id that it has there."""
    added = [added_token(7, "b"), added_token(2, "<x>")]
    write(tmp_path, tokenizer={"model": model, "added_tokens": added})
    expected = TokenTable({"a": 0, "b": 1, "<x>": 2}, {"b": added[0], "<x>": added[1]}, True)
    assert read_tokens(tmp_path) == expected


def test_tokens_are_read_from_vocab_json_with_the_lists_of_added_tokens(tmp_path: Path) -> None:
    write(tmp_path, vocab={"a": 0, "b": 1}, added_tokens={"<x>": 2, "<y>": 3})
    decoder = {"2": {"content": "<x>", "special": True}}
    write(tmp_path, tokenizer_config={"added_tokens_decoder": decoder})
    table = read_tokens(tmp_path)
    assert table is not None and not table.fast
    assert table.ids == {"a": 0, "b": 1, "<x>": 2, "<y>": 3}
    assert {text: token["special"] for text, token in table.added.items()} == {"<x>": True, "<y>": False}


def test_tokens_are_read_from_vocab_txt(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert read_tokens(tmp_path) is None
    # U+2028 separates lines for Python's splitlines, but is a token here.
    (tmp_path / "vocab.txt").write_text("[PAD]\na\n\u2028\nb\n", encoding="utf-8")
    table = read_tokens(tmp_path)
    assert table is not None and table.ids == {"[PAD]": 0, "a": 1, "\u2028": 2, "b": 3}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "damaged_file"),
        ("[]", "not_a_json_object"),
        ("{}", "missing_vocabulary"),
        ('{"model": {"vocab": {"a": "b"}}}', "damaged_file"),
    ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with raises_error(code):
        read_tokens(tmp_path)


def test_appended_tokens_are_in_every_file_that_lists_added_tokens(tmp_path: Path) -> None:
    write(tmp_path, tokenizer={"model": {"vocab": {"é": 0}}}, tokenizer_config={"model_max_length": 5})
    token = added_token(1, "<x>")
    append_tokens(tmp_path, [token])
    assert read_json(tmp_path / "tokenizer_config.json") == {"model_max_length": 5}
    assert not (tmp_path / "added_tokens.json").exists(), "lists that are not there are not made"
    write(tmp_path, tokenizer={"model": {"vocab": {"é": 0}}, "added_tokens": []}, added_tokens={})
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {}, "model_max_length": 5})
    append_tokens(tmp_path, [token])
    assert read_tokens(tmp_path) == TokenTable({"é": 0, "<x>": 1}, {"<x>": token}, True)
    flags = {key: value for key, value in token.items() if key != "id"}
    settings = read_json(tmp_path / "tokenizer_config.json")
    assert settings == {"added_tokens_decoder": {"1": flags}, "model_max_length": 5}
    assert read_json(tmp_path / "added_tokens.json") == {"<x>": 1}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"from": folder.name}))
    return folder


def written(config_from: Path, tokenizer_from: Path, **arguments: Any) -> Path:
    """The folder of a result."""
    out = config_from.with_name("out")
    out.mkdir()
    values: dict[str, Any] = {"config": {"model_type": "llama"}, "added_tokens": None} | arguments
    write_model_files(out, config_from=config_from, tokenizer_from=tokenizer_from, **values)
    return out


TOKENIZER = {
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/rag.jinja"),
}
MODEL = {"preprocessor_config.json", "processor_config.json"}
LEFT = {
    *("README.md", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
    *("training_args.bin", "handler.py", "trainer_state.json"),
}


def test_everything_beside_the_weights_is_copied_from_the_model_that_lends_it(tmp_path: Path) -> None:
    """Generation settings name token ids, so they go with the tokenizer, if it has some."""
    names = {"config.json", "generation_config.json", *TOKENIZER, *MODEL, *LEFT}
    base, other = fill(tmp_path / "base", *names), fill(tmp_path / "other", *names)
    out = written(base, other)
    assert files(out) == {"config.json", "generation_config.json", *TOKENIZER, *MODEL}
    assert {read_json(out / name)["from"] for name in MODEL} == {"base"}
    assert {read_json(out / name)["from"] for name in (*TOKENIZER, "generation_config.json")} == {"other"}
    assert read_json(out / "config.json") == {"model_type": "llama"}
    (other / "generation_config.json").unlink()
    assert copied_files(base, other)["generation_config.json"].parent == base


def test_remote_code_is_copied(tmp_path: Path) -> None:
    base = fill(tmp_path / "base", "modeling_x.py", "shared.py")
    other = fill(tmp_path / "other", "tokenization_x.py", "shared.py")
    write(base, config={"auto_map": {"AutoModel": "modeling_x.Model"}})
    write(other, tokenizer_config={"auto_map": {}})
    out = written(base, other)
    assert {"modeling_x.py", "tokenization_x.py", "shared.py"} < files(out)
    assert read_json(out / "shared.py")["from"] == "base"


def test_links_into_a_cache_become_files_and_others_are_refused(tmp_path: Path) -> None:
    """A hub cache: snapshots/COMMIT/file -> ../../blobs/HASH."""
    base = fill(tmp_path / "hub" / "snapshots" / "c0", "config.json")
    blob = fill(tmp_path / "hub" / "blobs", "0123") / "0123"
    (base / "tokenizer.json").symlink_to("../../blobs/0123")
    (base / "vocab.json").symlink_to("tokenizer.json")
    out = written(base, base)
    assert not (out / "tokenizer.json").is_symlink()
    assert (out / "vocab.json").read_bytes() == (out / "tokenizer.json").read_bytes() == blob.read_bytes()
    (base / "generation_config.json").symlink_to(fill(tmp_path, "secret") / "secret")
    with raises_error("link_outside_folder"):
        copied_files(base, base)


@pytest.mark.parametrize("decoder", [True, False], ids=["transformers 4", "transformers 5"])
def test_tokens_are_appended_to_a_tokenizer_with_a_class_of_its_own(tmp_path: Path, decoder: bool) -> None:
    from transformers import AutoTokenizer, GPT2Tokenizer

    base = tmp_path / "base"
    merges: Any = [("a", "b")]
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    GPT2Tokenizer(vocab=vocab, merges=merges).save_pretrained(base)
    if decoder:
        listed = {"content": "<|endoftext|>", "special": True, "normalized": True}
        settings = read_json(base / "tokenizer_config.json") | {"added_tokens_decoder": {"3": listed}}
        write(base, tokenizer_config=settings)
    out = written(base, base, added_tokens=[added_token(4, "<|im_start|>")])
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert type(tokenizer) is GPT2Tokenizer and len(tokenizer) == 5
    assert tokenizer.encode("ab<|im_start|>a<|endoftext|>") == [2, 4, 0, 3]


def test_a_tokenizer_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    write(tmp_path, tokenizer={"model": {"vocab": {"a": 0}}}, config={})
    good = (tmp_path / "tokenizer.json").read_bytes()
    entry = {"size": len(good), "crc32": f"{zlib.crc32(good):08x}"}
    write(tmp_path, checksums={"files": {"tokenizer.json": entry}})
    assert "tokenizer.json" in copied_files(tmp_path, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(good.replace(b"a", b"b"))
    with raises_error("damaged_model"):
        copied_files(tmp_path, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with raises_error("damaged_model", path=str(tmp_path / "tokenizer.json")):
        copied_files(tmp_path, tmp_path)
