from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.files.small_files import TokenTable, append_tokens, read_tokens


def added_token(i: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": i, "content": text, **flags}


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("model", [{"vocab": {"a": 0, "b": 1}}, {"vocab": [["a", 0.0], ["b", -1.5]]}])
def test_tokens_are_read_from_tokenizer_json(tmp_path: Path, model: dict[str, Any]):
    added = [added_token(1, "b"), added_token(2, "<x>")]
    write(tmp_path / "tokenizer.json", {"model": model, "added_tokens": added})
    table = read_tokens(tmp_path)
    assert table == TokenTable({"a": 0, "b": 1, "<x>": 2}, {"b": added[0], "<x>": added[1]}, True)


def test_an_added_token_that_is_in_the_vocabulary_has_the_id_of_the_vocabulary(tmp_path: Path):
    added = [added_token(7, "b")]
    write(tmp_path / "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added})
    table = read_tokens(tmp_path)
    assert table is not None and table.ids == {"a": 0, "b": 1}


def test_tokens_are_read_from_vocab_json_with_the_lists_of_added_tokens(tmp_path: Path):
    write(tmp_path / "vocab.json", {"a": 0, "b": 1})
    write(tmp_path / "added_tokens.json", {"<x>": 2, "<y>": 3})
    write(
        tmp_path / "tokenizer_config.json",
        {"added_tokens_decoder": {"2": {"content": "<x>", "special": True}}},
    )
    table = read_tokens(tmp_path)
    assert table is not None and not table.fast
    assert table.ids == {"a": 0, "b": 1, "<x>": 2, "<y>": 3}
    assert [(text, token["special"]) for text, token in table.added.items()] == [
        ("<x>", True),
        ("<y>", False),
    ]


def test_tokens_are_read_from_vocab_txt(tmp_path: Path):
    # U+2028 separates lines for Python's splitlines, but is a token here.
    (tmp_path / "vocab.txt").write_text("[PAD]\na\n\u2028\nb\n", encoding="utf-8")
    table = read_tokens(tmp_path)
    assert table is not None
    assert table.ids == {"[PAD]": 0, "a": 1, "\u2028": 2, "b": 3}


def test_a_folder_without_a_readable_vocabulary_has_no_tokens(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert read_tokens(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "damaged_file"),
        ("[]", "not_a_json_object"),
        ("{}", "missing_vocabulary"),
        ('{"model": {"vocab": {"a": "b"}}}', "damaged_file"),
    ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: str, code: str):
    (tmp_path / "tokenizer.json").write_text(text)
    with raises_error(code):
        read_tokens(tmp_path)


def test_appended_tokens_are_in_every_file_that_lists_added_tokens(tmp_path: Path):
    write(tmp_path / "tokenizer.json", {"model": {"vocab": {"é": 0}}, "added_tokens": []})
    write(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {}, "model_max_length": 5})
    write(tmp_path / "added_tokens.json", {})
    token = added_token(1, "<x>")
    append_tokens(tmp_path, [token])
    assert read_tokens(tmp_path) == TokenTable({"é": 0, "<x>": 1}, {"<x>": token}, True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    flags = {key: value for key, value in token.items() if key != "id"}
    assert settings == {"added_tokens_decoder": {"1": flags}, "model_max_length": 5}
    assert json.loads((tmp_path / "added_tokens.json").read_text()) == {"<x>": 1}


def test_nothing_is_appended_to_lists_that_are_not_there(tmp_path: Path):
    write(tmp_path / "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    write(tmp_path / "tokenizer_config.json", {"model_max_length": 5})
    append_tokens(tmp_path, [added_token(1, "<x>")])
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"model_max_length": 5}
    assert not (tmp_path / "added_tokens.json").exists()
