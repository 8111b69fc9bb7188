"""Config files as plain values: YAML, JSON, and what a file is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.config.reading import dump_yaml, parse_yaml, read_file
from rlhf_merge.errors import MergeError


def written(folder: Path, text: str, name: str = "merge.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.e-5", "+1.0e-5", ".1e-4"])
def test_yaml_floats_are_those_of_yaml_1_2(text: str) -> None:
    assert parse_yaml(f"x: {text}") == {"x": pytest.approx(1e-5)}


def test_what_is_written_reads_back_without_anchors() -> None:
    shared = [0.2, 0.8]
    values: dict[str, Any] = {"model": "1e5", "other": "1e-5", "tol": 1e-5, "word": "no", "long": "x" * 500}
    values |= {"a": shared, "b": shared}
    assert parse_yaml(dump_yaml(values)) == values and "&" not in dump_yaml(values)


def test_anchors_and_merge_keys_are_no_duplicates(tmp_path: Path) -> None:
    models = "- &a {model: a, weight: 0.5}\n- {<<: *a, model: b}\n- *a\n"
    config = MergeConfig.from_file(written(tmp_path, f"method: ties\nbase: x\nmodels:\n{models}"))
    assert config.to_dict()["models"] == [{"model": model, "weight": 0.5} for model in "aba"]


def test_both_schemas_are_told_apart(tmp_path: Path) -> None:
    ours = MergeConfig.from_file(written(tmp_path, "method: linear\nmodels: [a, b]\nweight: 1\n"))
    text = (
        '{"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], "parameters": {"weight": 1}}'
    )
    assert MergeConfig.from_file(written(tmp_path, text, "merge.json")) == ours


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("m.toml", "", "unknown_file_type"),
        ("m.yaml", "method: ties\nmethod: linear\n", "repeated_key"),
        ("m.yaml", "models:\n- {model: a, weight: 1,\n   weight: 2}", "repeated_key"),
        ("m.yaml", "a: 1\nb: [", "invalid_yaml"),
        ("m.yaml", "? [1]\n: 2", "invalid_yaml"),
        ("m.yaml", "a: !!python/object:os.system {}", "invalid_yaml"),
        ("m.yaml", "a: 2024-13-45", "invalid_yaml"),
        ("m.yaml", "", "invalid_value"),
        ("m.yaml", "- a", "invalid_value"),
        ("m.json", '{"method": "ties", "method": 1}', "repeated_key"),
        ("m.json", '{"a": {"b": 1, "b": 2}}', "repeated_key"),
        ("m.json", '{"a": 1,\n}', "damaged_file"),
        ("m.yaml", "models: [a]", "missing_key"),
        ("m.yaml", "method: ties\nmerge_method: ties", "conflicting_options"),
        ("m.yaml", "method: tie", "invalid_value"),
        ("m.yaml", "merge_method: tie", "invalid_value"),
        ("m.yaml", "base_model: a\ngate_mode: random\nexperts: [{source_model: b}]", "unsupported_config"),
        ("m.json", '{"method": "linear", "models": ["a"], "weight": NaN}', "invalid_value"),
    ],
)
def test_a_file_is_refused_with_its_name(tmp_path: Path, name: str, text: str, code: str) -> None:
    with raises_error(code) as error:
        MergeConfig.from_file(written(tmp_path, text, name))
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize(("text", "line"), [("a: 1\nb: [", 2), ("a: 1\na: 2", 2), ("? [1]\n: 2", 1)])
def test_mistakes_in_yaml_are_said_with_their_line(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(MergeError, match=f"in line {line}"):
        read_file(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"method: \xe9")
    names = {"none": "unreadable_file", "folder": "unreadable_file", "latin": "damaged_file"}
    for name, code in names.items():
        with raises_error(code):
            read_file(tmp_path / f"{name}.yaml")
