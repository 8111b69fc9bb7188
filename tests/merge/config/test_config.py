"""MergeConfig: our schema, its plain form, precedence, and values that do not fit together."""

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
from rlhf_merge.config.settings import Rule, Setting

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


def ties(**changes: Any) -> dict[str, Any]:
    return {"method": "ties", "base": "base", "models": ["a", "b"]} | changes


def entry(model: str, **parameters: Any) -> ModelEntry:
    return ModelEntry(model=model, parameters=parameters)


def sources(*models: str, **more: Any) -> dict[str, Any]:
    return {"sources": [{"model": model, "layers": [0, 4]} for model in models]} | more


def test_the_example_is_read(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text(EXAMPLE)
    config = MergeConfig.from_file(path)
    assert (config.method, config.base, config.dtype, config.vocab, config.seed) == (
        "dare_ties",
        "path/to/base",
        "bfloat16",
        "union",
        3,
    )
    assert config.models == (
        ModelEntry(model="path/to/a"),
        entry("path/to/b", weight=[0.2, 0.8], density={"mlp": 0.5, "*": 0.3}),
    )
    assert config.parameters["lambda"] == Setting((Rule(None, (0.1,)),))
    assert config.slices == ()


def test_the_fields_have_defaults() -> None:
    config = MergeConfig.from_dict({"method": "linear", "models": ["a"], "base": None, "dtype": None})
    assert (config.base, config.slices, config.parameters) == (None, (), {})
    assert (config.dtype, config.vocab, config.seed) == (None, None, 0)


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("fp64", "float64"),
        ("float32", "float32"),
    ],
)
def test_dtypes_have_one_name(given: str, full: str) -> None:
    assert MergeConfig.from_dict(ties(dtype=given)).dtype == full


def test_a_path_object_is_a_model(tmp_path: Path) -> None:
    config = MergeConfig.from_dict(ties(base=tmp_path, models=[tmp_path / "a", {"model": tmp_path / "b"}]))
    assert config.model_specs == (str(tmp_path), str(tmp_path / "a"), str(tmp_path / "b"))


PLAIN_FORMS = [
    {"method": "linear", "models": ["a", "b", "a"]},
    ties(models=["a", {"model": "b", "weight": [0.2, 0.8], "density": {"mlp": 0.5, "*": 0.3}}]),
    ties(density=0.5, sign="count", normalize=False, dtype="float16", vocab="b", seed=7) | {"lambda": 1e-5},
    {"method": "karcher", "base": "a", "models": ["a", "b"], "max_iter": 4, "tol": 1e-7, "vocab": "truncate"},
    {
        "method": "ties",
        "base": "base",
        "slices": [
            sources("base", "a", density=0.5),
            {
                "sources": [
                    {"model": "b", "layers": [2, 4], "weight": 0.3},
                    {"model": "a", "layers": [4, 6]},
                ],
                "base": "a",
            },
        ],
    },
    {"method": "slerp", "models": ["1e5", "no"], "t": {"self_attn": [0.0, 1.0], "*": 0.5}},
]


@pytest.mark.parametrize("plain", PLAIN_FORMS)
def test_the_plain_form_is_the_shortest_and_reads_back(plain: dict[str, Any], tmp_path: Path) -> None:
    config = MergeConfig.from_dict(plain)
    assert config.to_dict() == plain
    assert MergeConfig.from_dict(config.to_dict()) == config
    yaml_file, json_file = tmp_path / "merge.yml", tmp_path / "merge.json"
    yaml_file.write_text(config.to_yaml())
    json_file.write_text(json.dumps(config.to_dict()))
    assert MergeConfig.from_file(yaml_file) == config
    assert MergeConfig.from_file(json_file) == config


def test_yaml_is_short() -> None:
    config = MergeConfig.from_dict(ties(models=["a", {"model": "b", "weight": [0.2, 0.8]}], seed=1))
    assert config.to_yaml() == (
        "method: ties\nbase: base\nmodels:\n- a\n- model: b\n  weight: [0.2, 0.8]\nseed: 1\n"
    )


def test_a_config_can_be_built_from_parts() -> None:
    source = SliceSource(model="a", layers=(0, 2), parameters=entry("a", weight=2).parameters)
    config = MergeConfig(method="passthrough", slices=(Slice(sources=(source,)),))
    assert config.to_dict() == {
        "method": "passthrough",
        "slices": [{"sources": [{"model": "a", "layers": [0, 2], "weight": 2.0}]}],
    }
    model = {"method": "linear", "models": [{"model": "a", "parameters": {"weight": "x"}}]}
    for fields, code, key in (
        (model, "invalid_value", "weight"),
        (
            {"method": "linear", "parameters": {"wieght": 1}},
            "unknown_key",
            "wieght",
        ),
        ({"method": "linear", "models": (ModelEntry(model="a"),), "seed": -1}, "invalid_value", "seed"),
        ({"method": "linear", "modles": []}, "unknown_key", "modles"),
    ):
        with raises_error(code, key=key):
            MergeConfig(**fields)


def test_a_config_is_frozen() -> None:
    config = MergeConfig.from_dict(ties())
    with pytest.raises(ValidationError):
        config.method = "linear"


def test_values_come_from_the_most_specific_place() -> None:
    config = MergeConfig.from_dict(
        {
            "method": "ties",
            "base": "base",
            "slices": [
                {
                    "sources": [
                        {"model": "a", "layers": [0, 3], "weight": {"mlp": 0.1}},
                        {"model": "base", "layers": [0, 3]},
                        {"model": "b", "layers": [3, 6], "density": [0.2, 0.4]},
                    ],
                    "weight": {"mlp": 0.2, "attn": 0.3},
                    "lambda": [0, 2],
                }
            ],
            "weight": 0.4,
            "density": 0.5,
            "lambda": 3,
        }
    )
    # Of the source a: its own weight for mlp; of b, and of a elsewhere: the slice's, then the merge's.
    values = config.values("layers.1.mlp", 0.5, 0)
    assert values.per_model == (
        {"weight": 0.1, "density": 0.5},
        {"weight": 0.2, "density": pytest.approx(0.3)},
    )
    assert values.shared == {"lambda": 1.0, "normalize": True, "sign": "mass"}
    assert [own["weight"] for own in config.values("layers.1.attn", 0.5, 0).per_model] == [0.3, 0.3]
    assert [own["weight"] for own in config.values("norm", 0.0, 0).per_model] == [0.4, 0.4]
    assert [source.model for source in config.merged(0)] == ["a", "b"]
    base = config.slice_base(0)
    assert base is not None
    assert (base.model, base.layers) == ("base", (0, 3))
    assert config.model_specs == ("base", "a", "b")


def test_filters_of_models_look_at_the_names_in_the_models() -> None:
    # In a slice, layer 0 of the output comes from layer 8 of the model.
    config = MergeConfig.from_dict(
        {
            "method": "passthrough",
            "slices": [{"sources": [{"model": "a", "layers": [8, 9], "weight": {"layers.8.": 0.5}}]}],
        }
    )
    assert config.values("layers.0.mlp", 1, 0).per_model == ({"weight": 1.0},)
    assert config.values("layers.0.mlp", 1, 0, ["layers.8.mlp"]).per_model == ({"weight": 0.5},)


@pytest.mark.parametrize("method", ["linear", "karcher", "passthrough", "slerp"])
def test_a_base_that_only_lends_its_tokenizer_may_be_a_model(method: str) -> None:
    models = {"passthrough": ["base"], "slerp": ["a", "base"]}.get(method, ["base", "a", "base"])
    config = MergeConfig.from_dict({"method": method, "base": "base", "models": models, "vocab": "base"})
    assert [entry.model for entry in config.merged()] == models
    sliced = MergeConfig.from_dict({"method": method, "base": "base", "slices": [sources(*models)]})
    assert [entry.model for entry in sliced.merged(0)] == models
    assert sliced.slice_base(0) is None


def test_merged_wants_an_index_exactly_where_there_are_slices() -> None:
    with raises_error("invalid_slice_index"):
        MergeConfig.from_dict(ties()).merged(0)
    with raises_error("invalid_slice_index"):
        MergeConfig.from_dict({"method": "linear", "slices": [sources("a")]}).values("norm", 0)


def test_reading_configs_loads_no_torch() -> None:
    code = (
        "import sys; from rlhf_merge.config.merge_config import MergeConfig; "
        "MergeConfig.from_dict({'method': 'linear', 'models': ['a']}); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SUMMING = ["task_arithmetic", "dare_linear", "della_linear", "breadcrumbs"]
ELECTING = ["ties", "dare_ties", "della", "breadcrumbs_ties"]


def merge(method: str, first: Any, second: Any, **more: Any) -> MergeConfig:
    models = [{"model": "a", "weight": first}, {"model": "b", "weight": second}]
    base = {} if method in ("linear", "karcher") else {"base": "base"}
    return MergeConfig.from_dict({"method": method, "models": models} | base | more)


def weights(config: MergeConfig, tensor: str = "norm", depth: float = 0) -> list[float]:
    return [own["weight"] for own in config.values(tensor, depth).per_model]


@pytest.mark.parametrize(
    ("method", "first", "second", "more"),
    [
        ("linear", 0.5, -0.5, {}),
        ("linear", 0, 0, {}),
        ("karcher", 0, 0, {}),
        ("karcher", 2, -1, {}),
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
    assert weights(merge(method, weight, -weight, normalize=normalize)) == [weight, -weight]


def test_weights_that_cancel_in_one_place_are_refused_there() -> None:
    config = merge("linear", [1, 0], {"mlp": 0, "*": 1})
    assert weights(config, "layers.0.mlp") == [1, 0]
    with raises_error("weights_sum_to_zero"):
        weights(config, "layers.1.mlp", 1)


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
    plain = {"method": method, "base": "x", "models": ["a"], "density": density, "epsilon": epsilon}
    if allowed:
        values = MergeConfig.from_dict(plain).values("norm", 0)
        assert (values.per_model[0]["density"], values.per_model[0]["epsilon"]) == (density, epsilon)
        return
    with raises_error("invalid_keep_probability"):
        MergeConfig.from_dict(plain).values("norm", 0)
