"""What config files are refused for: YAML and JSON, and each mistake in a config of our schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.config.files import dump_yaml, parse_yaml, read_file
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS


def ties(**changes: Any) -> dict[str, Any]:
    return {"method": "ties", "base": "base", "models": ["a", "b"]} | changes


def model(**parameters: Any) -> dict[str, Any]:
    return {"model": "a"} | parameters


def sliced(method: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"method": method, "slices": list(parts)} | more


def part(*models: str, **more: Any) -> dict[str, Any]:
    return {"sources": [{"model": model, "layers": [0, 4]} for model in models]} | more


def layers(*ranges: Any) -> dict[str, Any]:
    return {"sources": [{"model": f"m{i}", "layers": item} for i, item in enumerate(ranges)]}


REFUSALS = [
    # Keys.
    (ties(densty=0.5), "unknown key densty; did"),
    (ties(models=["a", model(wieght=1)]), "models[1]: unknown key wieght"),
    (ties(models=[model(parameters={}, weight=1)]), "models[0]: weight stands beside parameters"),
    (ties(merge_method="ties"), "unknown key merge_method; did"),
    (sliced("linear", part("a", sorces=[])), "slices[0]: unknown key sorces"),
    (
        sliced("linear", {"sources": [{"model": "a", "layers": [0, 1], "layer": 1}]}),
        "slices[0].sources[0]: unknown key layer",
    ),
    ({1: 2, "method": "ties"}, "unknown key 1"),
    # Values of single keys.
    ([], "the top level is [], expected a mapping"),
    ({"models": ["a"]}, "has no method"),
    (ties(method="tie"), "method is 'tie', expected one of "),
    (ties(method=None), "has no method"),
    (ties(base=""), "base is '', expected a folder, a hub id or base+adapter"),
    (ties(models=["a", ""]), "models[1].model is '', expected a folder"),
    (ties(models=["a", {"model": 3}]), "models[1].model is 3, expected"),
    (ties(models=["a", 3]), "models[1] is 3, expected a mapping"),
    (ties(models=["a", {"weight": 3}]), "models[1] has no model; give it one"),
    (ties(models=[]), "models"),
    (ties(models={"a": 1}), "models is {'a': 1}, expected a list"),
    (ties(dtype="int8"), "dtype is 'int8', expected float32, float16, bfloat16 or float64"),
    (ties(dtype=16), "dtype is 16, expected"),
    (ties(seed=-1), "seed is -1, expected"),
    (ties(seed=1.0), "seed is 1.0, expected"),
    (ties(seed=True), "seed is True, expected"),
    (ties(vocab="c"), "vocab is 'c', expected union, truncate, base or"),
    (ties(vocab=3), "vocab is 3"),
    ({"method": "linear", "models": ["a"], "vocab": "base"}, "is to be the base's, but no base is given"),
    # Parameters.
    (ties(density=0), "density is 0, expected"),
    (ties(models=["a", model(density=1.01)]), "models[1].density is 1.01, expected"),
    (ties(t=0.5), "t: ties takes no parameter t; it takes weight, lambda, normalize, sign, density"),
    (ties(models=[model(gamma=0.1)]), "models[0].gamma: ties takes no parameter gamma; it takes weight"),
    (ties(models=["a", model(**{"lambda": 1})]), "models[1].lambda: lambda belongs to the whole merge"),
    ({"method": "model_stock", "base": "x", "models": ["a", "b"], "weight": 1}, "no parameter weight; it"),
    (sliced("linear", part("a", t=1)), "slices[0].t: linear takes no parameter t"),
    (
        sliced("linear", {"sources": [{"model": "a", "layers": [0, 1], "normalize": True}]}),
        "slices[0].sources[0].normalize: normalize belongs to the whole merge",
    ),
    (sliced("linear", part("a", weight="x")), "slices[0].weight is 'x', expected"),
    # The base and the number of models.
    ({"method": "ties"}, "a config has either models or slices, and neither is given"),
    (ties(slices=[part("base", "a")]), "a config has either models or slices, and both are given"),
    ({"method": "ties", "models": ["a"]}, "ties needs a base model and none is given"),
    (ties(models=["a", "base"]), "models[1] is the base base"),
    ({"method": "slerp", "models": ["a"]}, "models holds 1, but slerp merges 2 models; add some"),
    ({"method": "slerp", "models": ["a", "b", "c"]}, "models holds 3, but slerp merges 2 models; remove"),
    ({"method": "model_stock", "base": "x", "models": ["a"]}, "models holds 1, but model_stock merges at"),
    ({"method": "nearswap", "base": "x", "models": ["a", "b"]}, "models holds 2, but nearswap merges 1"),
    ({"method": "passthrough", "models": ["a", "b"]}, "models holds 2, but passthrough merges 1 model;"),
    # Slices.
    (sliced("slerp", part("a", "b"), part("a")), "slices[1].sources holds 1, but slerp merges 2 models"),
    (sliced("ties", part("x", "a"), base="y"), "slices[0].sources lists the base y 0 times"),
    (sliced("ties", part("y", "a", base="x"), base="y"), "slices[0].sources lists the base x 0 times"),
    (sliced("ties", part("y", "a", "y"), base="y"), "slices[0].sources lists the base y 2 times"),
    (sliced("ties", part("y"), base="y"), "slices[0].sources holds 0, but ties merges at least 1 model,"),
    (
        sliced("ties", {"sources": [{"model": "y", "layers": [0, 1], "weight": 1}]}, base="y"),
        "slices[0].sources gives the base y weight, which it cannot use; remove it",
    ),
    (sliced("linear", part("a", base="a")), "slices[0] has a base of its own, which linear does not use"),
    (sliced("linear", part("a", base=3)), "slices[0].base is 3, expected"),
    (sliced("linear", {}), "slices[0] has no sources"),
    (sliced("linear", {"sources": ["a"]}), "slices[0].sources[0] has no layers"),
    (sliced("linear", {"sources": [{"model": "a"}]}), "slices[0].sources[0] has no layers; give it one"),
    (sliced("linear", layers([0, 4], [2, 5])), "slices[0] has sources of different lengths: m0 [0, 4], m1"),
    (sliced("linear", layers([4, 4])), "slices[0].sources[0].layers is [4, 4], expected two whole numbers"),
    (sliced("linear", layers([-1, 4])), "layers is [-1, 4], expected two whole numbers [first, end]"),
    (sliced("linear", layers([0, 4.0])), "layers[1] is 4.0, expected"),
    (sliced("linear", layers([False, 4])), "layers[0] is False, expected"),
    (sliced("linear", layers([0, 2, 4])), "layers is [0, 2, 4], expected"),
    (sliced("linear", layers(8)), "layers is 8, expected"),
]


@pytest.mark.parametrize(("plain", "message"), REFUSALS)
def test_a_mistake_is_refused_in_one_sentence_that_names_it(plain: Any, message: str) -> None:
    with pytest.raises(MergeError) as error:
        MergeConfig.from_dict(plain, where="merge.yaml")
    assert str(error.value).startswith("merge.yaml: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_accepts_its_own_parameters_and_spelling(method: str) -> None:
    entry = METHODS[method]
    plain: dict[str, Any] = {
        "method": method.replace("_", "-"),
        "models": list("abc"[: max(1, entry.models[0])]),
    }
    if entry.base == "required":
        plain["base"] = "base"
    config = MergeConfig.from_dict(plain | entry.parameters)
    assert config.method == method
    values = config.values("lm_head", 0)
    merged = values.shared | (values.per_model[0] if values.per_model else {})
    assert merged == entry.parameters


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
        tmp_path, "method: ties\nbase: x\nmodels:\n- &a {model: a, weight: 0.5}\n- {<<: *a, model: b}\n- *a\n"
    )
    assert MergeConfig.from_file(path).to_dict()["models"] == [
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
        ("m.yaml", "models:\n- {model: a, weight: 1,\n   weight: 2}", "key weight is given again in line"),
        ("m.yaml", "a: 1\nb: [", "m.yaml: invalid YAML in line 2 ("),
        ("m.yaml", "? [1]\n: 2", "m.yaml: invalid YAML in line 1 (found unhashable key)"),
        ("m.yaml", "a: !!python/object:os.system {}", "m.yaml: invalid YAML in line 1 (could not determine"),
        ("m.yaml", "a: 2024-13-45", "m.yaml: invalid YAML (month must be in 1..12"),
        ("m.yaml", "", "m.yaml: the top level is None, expected a mapping"),
        ("m.yaml", "- a", "m.yaml: the top level is ['a'], expected a mapping"),
        ("m.json", '{"method": "ties", "method": 1}', "m.json: key method is given again in one mapping;"),
        ("m.json", '{"a": {"b": 1, "b": 2}}', "m.json: key b is given again in one mapping"),
        ("m.json", '{"a": 1,\n}', "m.json: invalid JSON in line "),
        ("m.yaml", "models: [a]", "merge_method (of mergekit) is needed; neither"),
        ("m.yaml", "method: ties\nmerge_method: ties", "merge_method (of mergekit) is needed; both"),
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
    with raises_error("unreadable_file"):
        read_file(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with raises_error("unreadable_file"):
        read_file(tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"method: \xe9")
    with raises_error("damaged_file"):
        read_file(tmp_path / "latin.yaml")
