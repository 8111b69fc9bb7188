"""Config files: YAML and JSON, what is read from them and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_merge.config.files import dump_yaml, parse_yaml, read_file
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError


def written(folder: Path, text: str, name: str = "merge.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.e-5", "+1.0e-5", ".1e-4"])
def test_yaml_floats_are_those_of_yaml_1_2(text: str) -> None:
    assert parse_yaml(f"x: {text}") == {"x": pytest.approx(1e-5)}


def test_text_that_looks_like_a_number_is_quoted() -> None:
    values: dict[str, Any] = {"model": "1e5", "other": "1e-5", "tol": 1e-5, "word": "no", "long": "x" * 500}
    assert parse_yaml(dump_yaml(values)) == values


def test_values_that_occur_twice_are_written_twice() -> None:
    shared = [0.2, 0.8]
    assert "&" not in dump_yaml({"a": shared, "b": shared})


def test_anchors_and_merge_keys_are_no_duplicates(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "method: ties\nbase: x\nmodels:\n- &a {model: a, weight: 0.5}\n- {<<: *a, model: b}\n- *a\n",
    )
    assert [entry.to_dict() for entry in MergeConfig.from_file(path).models] == [
        {"model": "a", "weight": 0.5},
        {"model": "b", "weight": 0.5},
        {"model": "a", "weight": 0.5},
    ]


def test_both_schemas_are_told_apart(tmp_path: Path) -> None:
    ours = MergeConfig.from_file(written(tmp_path, "method: linear\nmodels: [a, b]\n"))
    text = (
        '{"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], "parameters": {"weight": 1}}'
    )
    theirs = MergeConfig.from_file(written(tmp_path, text, "merge.json"))
    assert theirs.models == ours.models
    assert theirs.to_dict() == {"method": "linear", "models": ["a", "b"], "weight": 1.0}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.toml", "", "is of unknown type '.toml', expected .yaml, .yml or .json"),
        ("m.yaml", "method: ties\nmethod: linear\n", "m.yaml: key method is given again in line 2; keep one"),
        (
            "m.yaml",
            "models:\n- {model: a, weight: 1,\n   weight: 2}",
            "key weight is given again in line 3; keep one",
        ),
        ("m.yaml", "a: 1\nb: [", "m.yaml: invalid YAML in line 2 ("),
        ("m.yaml", "? [1]\n: 2", "m.yaml: invalid YAML in line 1 (found unhashable key)"),
        ("m.yaml", "a: !!python/object:os.system {}", "m.yaml: invalid YAML in line 1 (could not determine"),
        ("m.yaml", "a: 2024-13-45", "m.yaml: invalid YAML (month must be in 1..12"),
        ("m.yaml", "", "m.yaml: the top level is None, expected a mapping"),
        ("m.yaml", "- a", "m.yaml: the top level is ['a'], expected a mapping"),
        (
            "m.json",
            '{"method": "ties", "method": 1}',
            "m.json: key method is given again in one mapping; keep one",
        ),
        ("m.json", '{"a": {"b": 1, "b": 2}}', "m.json: key b is given again in one mapping"),
        ("m.json", '{"a": 1,\n}', "m.json: invalid JSON in line "),
        (
            "m.yaml",
            "models: [a]",
            "has the key method, one of mergekit the key merge_method, and neither is there",
        ),
        (
            "m.yaml",
            "method: ties\nmerge_method: ties",
            "the key merge_method, and both are there; give one of them",
        ),
        ("m.yaml", "method: tie", "m.yaml: method is 'tie', expected one of "),
        ("m.yaml", "merge_method: tie", "m.yaml: merge_method is 'tie', expected one of"),
        ("m.json", '{"method": "linear", "models": ["a"], "weight": NaN}', "m.json: weight is nan, expected"),
    ],
)
def test_a_file_is_refused_with_its_name_and_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(MergeError) as error:
        MergeConfig.from_file(written(tmp_path, text, name))
    assert message in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=r"none\.yaml cannot be read \(No such file"):
        read_file(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(MergeError, match=r"folder\.yaml cannot be read \(Is a directory\)"):
        read_file(tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"method: \xe9")
    with pytest.raises(MergeError, match=r"latin\.yaml is damaged \(UnicodeDecodeError: 'utf-8'"):
        read_file(tmp_path / "latin.yaml")
