"""MergeConfig: our schema, its plain form, precedence, and what does not fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raises import raises_error
from rlhf_merge.config.merge_config import MergeConfig, ModelEntry, Slice, SliceSource
from rlhf_merge.config.reading import parse_yaml
from rlhf_merge.config.settings import Rule, Setting
from rlhf_merge.methods.families import METHODS

EXAMPLE = """\
method: dare-ties
base: path/to/base
models:
  - path/to/a
  - {model: path/to/b, weight: [0.2, 0.8], density: {mlp: 0.5, "*": 0.3}}
density: 0.5
lambda: 1e-1
dtype: bf16
vocab: union
seed: 3
"""
SHORT = {
    **{"<ties>": "method: ties, base: base, models: [a, b]", "<lin>": "method: linear, models: [a, b]"},
    **{"<cut>": "method: linear, slices", "<first>": "model: a, layers: [0, 1]"},
    **{f"<{name}>": f"{{model: {name}, layers: [0, 4]}}" for name in "abxy"},
}
"""What stands for longer text in the flow style YAML of the tables below."""


def plain(text: str) -> Any:
    for short, full in SHORT.items():
        text = text.replace(short, full)
    return parse_yaml(text)


def read(text: str) -> MergeConfig:
    return MergeConfig.from_dict(plain(text))


def entry(model: str, **parameters: Any) -> ModelEntry:
    return ModelEntry(model=model, parameters=parameters)


def test_the_example_is_read(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text(EXAMPLE)
    config = MergeConfig.from_file(path)
    given = (config.method, config.base, config.dtype, config.vocab, config.seed)
    assert given == ("dare_ties", "path/to/base", "bfloat16", "union", 3)
    weighted = entry("path/to/b", weight=[0.2, 0.8], density={"mlp": 0.5, "*": 0.3})
    assert config.models == (ModelEntry(model="path/to/a"), weighted)
    assert config.parameters["lambda"] == Setting((Rule(None, (0.1,)),)) and config.slices == ()


def test_the_fields_have_defaults_and_are_frozen() -> None:
    config = MergeConfig.from_dict({"method": "linear", "models": ["a"], "base": None, "dtype": None})
    assert (config.base, config.slices, config.parameters) == (None, (), {})
    assert (config.dtype, config.vocab, config.seed) == (None, None, 0)
    with pytest.raises(ValidationError):
        config.method = "ties"
    for given, full in {"fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}.items():
        assert read(f"{{<ties>, dtype: {given}}}").dtype == full


def test_a_path_object_is_a_model(tmp_path: Path) -> None:
    models = [tmp_path / "a", {"model": tmp_path / "b"}]
    config = MergeConfig.from_dict({"method": "ties", "base": tmp_path, "models": models})
    assert config.model_specs == (str(tmp_path), str(tmp_path / "a"), str(tmp_path / "b"))


@pytest.mark.parametrize(
    "text",
    [
        "{method: linear, models: [a, b, a]}",
        "{<ties>, density: 0.5, lambda: 1e-5, sign: count, normalize: false, dtype: float16, seed: 7}",
        "{method: karcher, base: a, models: [a, b], max_iter: 4, tol: 1e-7, vocab: truncate}",
        """{method: ties, base: base, slices: [
            {sources: [{model: base, layers: [0, 4]}, <a>], density: 0.5},
            {sources: [{model: b, layers: [2, 4], weight: 0.3}, {model: a, layers: [4, 6]}], base: a}]}""",
        "{method: slerp, models: ['1e5', 'no'], t: {self_attn: [0.0, 1.0], '*': 0.5}}",
    ],
)
def test_the_plain_form_is_the_shortest_and_reads_back(text: str, tmp_path: Path) -> None:
    config = read(text)
    assert config.to_dict() == plain(text) and MergeConfig.from_dict(config.to_dict()) == config
    for name, written in (("merge.yml", config.to_yaml()), ("merge.json", json.dumps(config.to_dict()))):
        (tmp_path / name).write_text(written)
        assert MergeConfig.from_file(tmp_path / name) == config


def test_a_config_can_be_built_from_parts() -> None:
    source = SliceSource(model="a", layers=(0, 2), parameters=entry("a", weight=2).parameters)
    config = MergeConfig(method="passthrough", slices=(Slice(sources=(source,)),))
    sources = [{"model": "a", "layers": [0, 2], "weight": 2.0}]
    assert config.to_dict() == {"method": "passthrough", "slices": [{"sources": sources}]}
    with raises_error("invalid_value", key="models[0].weight"):
        MergeConfig(method="linear", models=[{"model": "a", "parameters": {"weight": "x"}}])
    with raises_error("invalid_value", key="seed"):
        MergeConfig(method="linear", models=(ModelEntry(model="a"),), seed=-1)
    with raises_error("unknown_key", key="wieght"):
        MergeConfig(method="linear", parameters={"wieght": 1})
    with raises_error("unknown_key", key="modles"):
        MergeConfig(method="linear", modles=[])


def test_values_come_from_the_most_specific_place() -> None:
    config = read("""{method: ties, base: base, weight: 0.4, density: 0.5, lambda: 3, slices: [{
        weight: {mlp: 0.2, attn: 0.3}, lambda: [0, 2], sources: [
            {model: a, layers: [0, 3], weight: {mlp: 0.1}},
            {model: base, layers: [0, 3]},
            {model: b, layers: [3, 6], density: [0.2, 0.4]}]}]}""")
    # Of the source a: its own weight for mlp; of b, and of a elsewhere: the slice's, then the merge's.
    values = config.values("layers.1.mlp", 0.5, 0)
    third = pytest.approx(0.3)
    assert values.per_model == ({"weight": 0.1, "density": 0.5}, {"weight": 0.2, "density": third})
    assert values.shared == {"lambda": 1.0, "normalize": True, "sign": "mass"}
    assert config.values("layers.1.attn", 0.5, 0).of("weight") == [0.3, 0.3]
    assert config.values("norm", 0.0, 0).of("weight") == [0.4, 0.4]
    assert [source.model for source in config.merged(0)] == ["a", "b"]
    base = config.slice_base(0)
    assert base is not None and (base.model, base.layers) == ("base", (0, 3))
    assert config.model_specs == ("base", "a", "b")


def test_filters_of_models_look_at_the_names_in_the_models() -> None:
    # In a slice, layer 0 of the output comes from layer 8 of the model.
    sources = "[{model: a, layers: [8, 9], weight: {layers.8.: 0.5}}]"
    config = read(f"{{method: passthrough, slices: [{{sources: {sources}}}]}}")
    assert config.values("layers.0.mlp", 1, 0).of("weight") == [1.0]
    assert config.values("layers.0.mlp", 1, 0, ["layers.8.mlp"]).of("weight") == [0.5]


@pytest.mark.parametrize("method", ["linear", "karcher", "passthrough", "slerp"])
def test_a_base_that_only_lends_its_tokenizer_may_be_a_model(method: str) -> None:
    models = {"passthrough": ["x"], "slerp": ["a", "x"]}.get(method, ["x", "a", "x"])
    config = MergeConfig.from_dict({"method": method, "base": "x", "models": models, "vocab": "base"})
    assert [entry.model for entry in config.merged()] == models
    listed = ", ".join(f"<{model}>" for model in models)
    sliced = read(f"{{method: {method}, base: x, slices: [{{sources: [{listed}]}}]}}")
    assert [entry.model for entry in sliced.merged(0)] == models and sliced.slice_base(0) is None


def test_merged_wants_an_index_exactly_where_there_are_slices() -> None:
    with raises_error("invalid_slice_index"):
        read("{<ties>}").merged(0)
    with raises_error("invalid_slice_index"):
        read("{method: linear, slices: [{sources: [<a>]}]}").values("norm", 0)


def test_reading_configs_loads_no_torch() -> None:
    code = (
        "import sys; from rlhf_merge.config.merge_config import MergeConfig; "
        "MergeConfig.from_dict({'method': 'linear', 'models': ['a']}); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("method", METHODS)
def test_every_method_accepts_its_own_parameters_and_spelling(method: str) -> None:
    known = METHODS[method]
    given: dict[str, Any] = {"method": method.replace("_", "-"), "models": list("abc"[: known.models[0]])}
    given |= {"base": "base"} if known.base == "required" else {}
    config = MergeConfig.from_dict(given | known.parameters)
    values = config.values("lm_head", 0)
    assert config.method == method and values.shared | values.per_model[0] == known.parameters


SUMMING = ["task_arithmetic", "dare_linear", "della_linear", "breadcrumbs"]
ELECTING = ["ties", "dare_ties", "della", "breadcrumbs_ties"]


def merge(method: str, first: Any, second: Any, **more: Any) -> MergeConfig:
    models = [{"model": "a", "weight": first}, {"model": "b", "weight": second}]
    base = {} if method in ("linear", "karcher") else {"base": "base"}
    return MergeConfig.from_dict({"method": method, "models": models} | base | more)


@pytest.mark.parametrize(
    ("method", "first", "second", "more"),
    [
        *(("linear", 0.5, -0.5, {}), ("linear", 0, 0, {}), ("karcher", 0, 0, {}), ("karcher", 2, -1, {})),
        ("linear", 0.3, -(0.1 + 0.2), {}),  # zero but for rounding
        *((method, 1, -1, {"normalize": True}) for method in SUMMING),
        *((method, 0, 0, {"normalize": True}) for method in ELECTING),
    ],
)
def test_weights_that_cannot_divide_are_refused(
    method: str, first: float, second: float, more: dict[str, Any]
) -> None:
    with raises_error("negative_weight" if method == "karcher" and second < 0 else "weights_sum_to_zero"):
        merge(method, first, second, **more).values("norm", 0)


@pytest.mark.parametrize(
    ("method", "weight", "normalize"),
    [
        ("linear", 1, False),
        *((method, 1, False) for method in SUMMING),
        *((method, 1, True) for method in ELECTING),
        *((method, 0, False) for method in ELECTING),
    ],
)
def test_weights_that_do_not_divide_may_cancel(method: str, weight: float, normalize: bool) -> None:
    config = merge(method, weight, -weight, normalize=normalize)
    assert config.values("norm", 0).of("weight") == [weight, -weight]


def test_weights_that_cancel_in_one_place_are_refused_there() -> None:
    config = merge("linear", [1, 0], {"mlp": 0, "*": 1})
    assert config.values("layers.0.mlp", 0).of("weight") == [1, 0]
    with raises_error("weights_sum_to_zero"):
        config.values("layers.1.mlp", 1)


@pytest.mark.parametrize("method", ["della", "della_linear"])
@pytest.mark.parametrize(
    ("density", "epsilon", "allowed"),
    [
        (0.5, 0.15, True),
        (0.9, 0.1, True),  # 0.9 + 0.1 = 1: the largest element is always kept
        (0.9, 0.15, False),
        (0.15, 0.15, False),  # the smallest element would be divided by the probability 0
        (0.1, 0.0, True),
        (1.0, 0.15, True),  # nothing is dropped
    ],
)
def test_della_needs_probabilities_above_zero_and_up_to_one(
    method: str, density: float, epsilon: float, allowed: bool
) -> None:
    config = read(f"{{method: {method}, base: x, models: [a], density: {density}, epsilon: {epsilon}}}")
    if allowed:
        assert config.values("norm", 0).of("epsilon") == [epsilon]
        return
    with raises_error("invalid_keep_probability"):
        config.values("norm", 0)


REFUSALS = """
{<ties>, densty: 0.5}                                    | unknown_key | densty
{method: ties, base: x, models: [a, {model: a, wieght: 1}]} | unknown_key | models[1].wieght
{method: ties, models: [{model: a, parameters: {}, weight: 1}]} | conflicting_options | models[0].weight
{<ties>, merge_method: ties}                             | unknown_key | merge_method
{<cut>: [{sources: [<a>], sorces: []}]}                  | unknown_key | slices[0].sorces
{<cut>: [{sources: [{<first>, layer: 1}]}]} | unknown_key | slices[0].sources[0].layer
{1: 2, method: ties}                                     | unknown_key | 1
[]                                                       | invalid_value |
{models: [a]}                                            | missing_key | method
{models: [a], method: null}                              | missing_key | method
{method: tie, models: [a]}                               | invalid_value | method
{method: ties, base: '', models: [a]}                    | invalid_value | base
{method: ties, base: x, models: [a, '']}                 | invalid_value | models[1].model
{method: ties, base: x, models: [a, {model: 3}]}         | invalid_value | models[1].model
{method: ties, base: x, models: [a, 3]}                  | invalid_value | models[1]
{method: ties, base: x, models: [a, {weight: 3}]}        | missing_key | models[1].model
{method: ties, base: x, models: []}                      | conflicting_options | models
{method: ties, base: x, models: {a: 1}}                  | invalid_value | models
{<ties>, dtype: int8}                                    | invalid_value | dtype
{<ties>, dtype: 16}                                      | invalid_value | dtype
{<ties>, seed: -1}                                       | invalid_value | seed
{<ties>, seed: 1.0}                                      | invalid_value | seed
{<ties>, seed: true}                                     | invalid_value | seed
{<ties>, vocab: c}                                       | invalid_value | vocab
{<ties>, vocab: 3}                                       | invalid_value | vocab
{<lin>, vocab: base}                                     | missing_value | base
{<lin>, ignore: 5}                                       | invalid_value | ignore
{<lin>, ignore: [5]}                                     | invalid_value | ignore[0]
{<lin>, ignore: ['']}                                    | invalid_value | ignore[0]
{<lin>, ignore: {a: 1}}                                  | invalid_value | ignore
{<lin>, stack: text}                                     | unused_key | stack
{<ties>, density: 0}                                     | invalid_value | density
{method: ties, base: x, models: [a, {model: b, density: 1.01}]} | invalid_value | models[1].density
{<ties>, t: 0.5}                                         | unknown_key | t
{method: ties, base: x, models: [{model: a, gamma: 0.1}]} | unknown_key | models[0].gamma
{method: ties, base: x, models: [a, {model: b, lambda: 1}]} | misplaced_parameter | models[1].lambda
{method: model_stock, base: x, models: [a, b], weight: 1} | unknown_key | weight
{<cut>: [{sources: [<a>], t: 1}]}                        | unknown_key | slices[0].t
{<cut>: [{sources: [{<first>, normalize: true}]}]} | misplaced_parameter | slices[0].sources[0].normalize
{<cut>: [{sources: [<a>], weight: x}]}                   | invalid_value | slices[0].weight
{method: ties}                                           | conflicting_options | models
{<ties>, slices: [{sources: [<x>, <a>]}]}                | conflicting_options | models
{method: ties, models: [a]}                              | missing_value | base
{method: ties, base: x, models: [a, x]}                  | repeated_model | models[1]
{method: slerp, models: [a]}                             | wrong_model_count | models
{method: slerp, models: [a, b, c]}                       | wrong_model_count | models
{method: model_stock, base: x, models: [a]}              | wrong_model_count | models
{method: nearswap, base: x, models: [a, b]}              | wrong_model_count | models
{method: slerp, slices: [{sources: [<a>, <b>]}, {sources: [<a>]}]} | wrong_model_count | slices[1].sources
{method: ties, base: y, slices: [{sources: [<x>, <a>]}]} | repeated_model | slices[0]
{method: ties, base: y, slices: [{sources: [<y>, <a>], base: x}]} | repeated_model | slices[0]
{method: ties, base: y, slices: [{sources: [<y>, <a>, <y>]}]} | repeated_model | slices[0]
{method: ties, base: y, slices: [{sources: [<y>]}]}      | wrong_model_count | slices[0].sources
{method: ties, base: a, slices: [{sources: [{<first>, weight: 1}]}]} | repeated_model | slices[0]
{<cut>: [{sources: [<a>], base: a}]}                     | repeated_model | slices[0]
{<cut>: [{sources: [<a>], base: 3}]}                     | invalid_value | slices[0].base
{<cut>: [{}]}                                            | missing_key | slices[0].sources
{<cut>: [{sources: [a]}]}                                | missing_key | slices[0].sources[0].layers
{<cut>: [{sources: [<a>, {model: b, layers: [2, 5]}]}]}  | different_lengths | slices[0]
{<cut>: [{sources: [{model: a, layers: [4, 4]}]}]}       | invalid_value | slices[0].sources[0].layers
{<cut>: [{sources: [{model: a, layers: [-1, 4]}]}]}      | invalid_value | slices[0].sources[0].layers
{<cut>: [{sources: [{model: a, layers: [0, 4.0]}]}]}     | invalid_value | slices[0].sources[0].layers[1]
{<cut>: [{sources: [{model: a, layers: [false, 4]}]}]}   | invalid_value | slices[0].sources[0].layers[0]
{<cut>: [{sources: [{model: a, layers: [0, 2, 4]}]}]}    | invalid_value | slices[0].sources[0].layers
{<cut>: [{sources: [{model: a, layers: 8}]}]}            | invalid_value | slices[0].sources[0].layers
"""


@pytest.mark.parametrize("line", REFUSALS.strip().splitlines())
def test_a_mistake_is_refused_in_one_sentence_that_names_it(line: str) -> None:
    text, code, key = (part.strip() for part in line.split("|"))
    with raises_error(code, key=key or None) as error:
        MergeConfig.from_dict(plain(text), where="merge.yaml")
    assert str(error.value).startswith("merge.yaml: ") and "\n" not in str(error.value)
