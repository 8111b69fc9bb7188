"""Configs of mergekit's schema: examples from its documentation, what they come to, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_merge.config.files import parse_yaml
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.methods.catalog import METHODS

from_mergekit = MergeConfig.from_mergekit

GRADIENT_SLERP = """
slices:
  - sources:
      - model: psmathur/orca_mini_v3_13b
        layer_range: [0, 40]
      - model: garage-bAInd/Platypus2-13B
        layer_range: [0, 40]
merge_method: slerp
base_model: psmathur/orca_mini_v3_13b
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # fallback for rest of tensors
dtype: float16
"""

TIES = """
models:
  - model: psmathur/orca_mini_v3_13b
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: garage-bAInd/Platypus2-13B
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: WizardLM/WizardMath-13B-V1.0
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: TheBloke/Llama-2-13B-fp16
parameters:
  normalize: true
  int8_mask: true
dtype: float16
"""

FRANKEN = """
slices:
  - sources:
    - model: psmathur/orca_mini_v3_13b
      layer_range: [0, 24]
  - sources:
    - model: garage-bAInd/Platypus2-13B
      layer_range: [20, 40]
merge_method: passthrough
dtype: float16
"""


def read(text: str) -> MergeConfig:
    return from_mergekit(parse_yaml(text), "mergekit.yml")


def ties(**changes: Any) -> dict[str, Any]:
    models = [{"model": "a", "parameters": {"weight": 1}}, {"model": "b", "parameters": {"weight": 2}}]
    return {"merge_method": "ties", "base_model": "base", "models": models} | changes


def linear(*models: str, **changes: Any) -> dict[str, Any]:
    entries = [{"model": model} for model in models]
    return {"merge_method": "linear", "models": entries, "parameters": {"weight": 1}} | changes


def slices(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"merge_method": "ties", "slices": list(parts), "parameters": {"weight": 1}} | more


def part(*models: str, **more: Any) -> dict[str, Any]:
    return {"sources": [{"model": model, "layer_range": [0, 4]} for model in models]} | more


def test_the_gradient_slerp_example() -> None:
    config = read(GRADIENT_SLERP)
    assert (config.method, config.base, config.dtype) == ("slerp", "psmathur/orca_mini_v3_13b", "float16")
    assert [source.model for source in config.merged(0)] == [
        "psmathur/orca_mini_v3_13b",
        "garage-bAInd/Platypus2-13B",
    ]
    assert config.slices[0].sources[1].layers == (0, 40)

    def t(tensor: str, layer: int) -> object:
        return config.values(f"model.layers.{layer}.{tensor}.weight", layer / 39, 0).shared["t"]

    # Five values lie at layers 0, 9.75, 19.5, 29.25 and 39. Layer 5 is 5/9.75 of the way from 0 to 0.5,
    # or from 1 to 0.5 for mlp; layer 20 is 0.5/9.75 of the way from 0.3 to 0.7.
    assert t("self_attn.q_proj", 0) == 0
    assert t("self_attn.q_proj", 5) == pytest.approx(0.5 * 5 / 9.75)
    assert t("self_attn.q_proj", 20) == pytest.approx(0.3 + 0.4 * 0.5 / 9.75)
    assert t("self_attn.q_proj", 39) == 1
    assert t("mlp.up_proj", 5) == pytest.approx(1 - 0.5 * 5 / 9.75)
    assert t("mlp.up_proj", 39) == 0
    assert t("input_layernorm", 5) == 0.5


def test_the_ties_example() -> None:
    config = read(TIES)
    assert (config.method, config.base) == ("ties", "TheBloke/Llama-2-13B-fp16")
    # Depth 1/4: densities of three values are halfway between the first two, (1 + 0.7)/2; weights of four are
    # at 3/4 between the first two, 0.3·3/4.
    first, second, third = config.values("model.layers.3.mlp.up_proj.weight", 0.25).per_model
    assert first == {"weight": 1, "density": pytest.approx(0.85)}
    assert second == {"weight": pytest.approx(0.225), "density": 0.5}
    assert third == {"weight": 0.5, "density": 0.33}
    assert config.values("model.norm.weight", 0).per_model[2]["weight"] == 0
    assert config.values("model.norm.weight", 0).shared == {"lambda": 1, "normalize": True, "sign": "mass"}


def test_the_passthrough_example() -> None:
    config = read(FRANKEN)
    assert config.base is None
    assert [(s.model, s.layers) for p in config.slices for s in p.sources] == [
        ("psmathur/orca_mini_v3_13b", (0, 24)),
        ("garage-bAInd/Platypus2-13B", (20, 40)),
    ]
    assert config.values("model.layers.0.mlp", 0, 1).per_model == ({"weight": 1},)


def test_the_example_of_scaled_layers() -> None:
    scaled = {"sources": [{"model": "a", "layer_range": [8, 9]}], "parameters": {"scale": [
        {"filter": "o_proj", "value": 0}, {"filter": "down_proj", "value": 0}, {"value": 1}]}}  # fmt: skip
    config = from_mergekit({"merge_method": "passthrough", "slices": [scaled]})
    assert config.values("layers.0.mlp.down_proj", 1, 0).per_model == ({"weight": 0},)
    assert config.values("layers.0.mlp.up_proj", 1, 0).per_model == ({"weight": 1},)


def test_it_is_the_config_of_our_schema() -> None:
    values = ties(parameters={"density": 0.5, "lambda": 2}, tokenizer_source="union", out_dtype="bfloat16")
    plain = {
        "method": "ties",
        "base": "base",
        "models": [{"model": "a", "weight": 1}, {"model": "b", "weight": 2}],
        "density": 0.5,
        "lambda": 2,
        "dtype": "bfloat16",
        "vocab": "union",
    }
    assert from_mergekit(values) == MergeConfig.from_dict(plain)


# From mergekit 0.1.5, merge_methods/registry.py, generalized_task_arithmetic.py, linear.py and karcher.py:
# what they take when nothing is said. Their rescale is also off where it is not listed, as ours is.
MERGEKIT_DEFAULTS = {
    "linear": {"normalize": True},
    "task_arithmetic": {"normalize": False, "lambda": 1.0},
    "ties": {"normalize": True, "lambda": 1.0, "density": 1.0},
    "dare_ties": {"normalize": False, "rescale": True, "lambda": 1.0, "density": 1.0},
    "dare_linear": {"normalize": False, "rescale": True, "lambda": 1.0, "density": 1.0},
    "breadcrumbs": {"normalize": False, "lambda": 1.0, "density": 1.0, "gamma": 0.01},
    "breadcrumbs_ties": {"normalize": False, "lambda": 1.0, "density": 1.0, "gamma": 0.01},
    "della": {"normalize": True, "rescale": True, "lambda": 1.0, "density": 1.0, "epsilon": 0.15},
    "della_linear": {"normalize": False, "rescale": True, "lambda": 1.0, "density": 1.0, "epsilon": 0.15},
    "karcher": {"max_iter": 10, "tol": 1e-5},
    "passthrough": {},
    "model_stock": {},
}


@pytest.mark.parametrize("method", MERGEKIT_DEFAULTS)
def test_defaults_are_mergekits(method: str) -> None:
    models = [{"model": model, "parameters": {"weight": 1}} for model in "ab"[: METHODS[method].models[1]]]
    if method == "model_stock" or method == "karcher":
        models = [{"model": model} for model in "ab"]
    elif method == "passthrough":
        models = [{"model": "a"}]
    base = {"base_model": "base"} if METHODS[method].base == "required" else {}
    values = from_mergekit({"merge_method": method, "models": models, **base}).values("w", 0.0)
    ours = {**values.shared, **values.per_model[0]}
    assert {k: v for k, v in ours.items() if k not in ("weight", "sign")} == MERGEKIT_DEFAULTS[method]


def test_elected_signs_are_mergekits() -> None:
    # mergekit elects by the sum of the task vectors, its ConsensusMethod.sum, in every method that elects.
    assert {entry.parameters["sign"] for entry in METHODS.values() if "sign" in entry.parameters} == {"mass"}


@pytest.mark.parametrize("order", [["base", "other"], ["other", "base"], ["other"]])
def test_slerp_runs_from_the_base_to_the_other(order: list[str]) -> None:
    models = [{"model": model} for model in order]
    config = from_mergekit(
        {"merge_method": "slerp", "base_model": "base", "models": models, "parameters": {"t": 0.3}}
    )
    assert (config.base, [entry.model for entry in config.models]) == ("base", ["base", "other"])


def test_slerp_of_slices_runs_from_the_slices_base() -> None:
    config = from_mergekit(
        {
            "merge_method": "slerp",
            "base_model": "a",
            "slices": [part("b", "a"), part("a", "b", base_model="b")],
            "parameters": {"t": 0.3},
        }
    )
    assert [[source.model for source in config.merged(index)] for index in (0, 1)] == [["a", "b"], ["b", "a"]]


def test_a_base_among_the_models_is_left_out_of_task_vectors_and_its_weight_ignored() -> None:
    base = {"model": "base", "parameters": {"weight": 9}}
    assert from_mergekit(ties(models=[base, *ties()["models"]])) == from_mergekit(ties())
    config = from_mergekit(slices(part("a", "base"), base_model="base"))
    config_with = from_mergekit(
        slices(
            {
                "sources": [
                    part("a")["sources"][0],
                    {"model": "base", "layer_range": [0, 4], "parameters": {"weight": 9}},
                ]
            },
            base_model="base",
        )
    )
    assert config == config_with
    assert [source.model for source in config.merged(0)] == ["a"]


def test_the_base_is_one_of_the_models_of_a_mean() -> None:
    kept = from_mergekit(linear("base", "a", base_model="base"))
    assert [entry.model for entry in kept.models] == ["base", "a"]
    # mergekit adds a base that is not listed, behind the others.
    added = from_mergekit(linear("a", base_model="base"))
    assert [entry.model for entry in added.models] == ["a", "base"]
    karcher = from_mergekit({"merge_method": "karcher", "base_model": "base", "models": [{"model": "a"}]})
    assert [entry.model for entry in karcher.models] == ["a", "base"]


def test_each_slice_may_name_its_own_base() -> None:
    bases = part("x", base_model="x"), part("y", base_model="y")
    weighed = {"model": "a", "layer_range": [4, 8], "parameters": {"weight": 0.5}}
    parts = [base | {"sources": [*base["sources"], weighed]} for base in bases]
    config = from_mergekit(slices(*parts, parameters=None))
    assert (config.base, config.slices[0].base, config.slices[1].base) == ("x", "x", "y")
    assert [source.model for index in (0, 1) for source in config.merged(index)] == ["a", "a"]


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, None),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float32", "out_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16", "out_dtype": None}, "float16"),
    ],
)
def test_the_type_of_the_output(keys: dict[str, Any], dtype: str | None) -> None:
    assert from_mergekit(ties(**keys)).dtype == dtype


@pytest.mark.parametrize(
    ("keys", "vocab"),
    [
        ({}, None),
        ({"tokenizer_source": "base"}, "base"),
        ({"tokenizer_source": "b"}, "b"),
        ({"tokenizer_source": {"model": {"path": "b"}}}, "b"),
        ({"tokenizer": {"source": "base", "tokens": None, "pad_to_multiple_of": None}}, "base"),
        ({"tokenizer": {}}, "union"),
        ({"tokenizer_source": None, "tokenizer": {"source": "union", "tokens": {}}}, "union"),
    ],
)
def test_the_vocabulary(keys: dict[str, Any], vocab: str | None) -> None:
    assert from_mergekit(ties(**keys)).vocab == vocab


@pytest.mark.parametrize(
    "reference",
    [
        "c+adapter",
        {"path": "c+adapter"},
        {"model": "c+adapter"},
        {"model": {"path": "c+adapter"}, "lora": None},
    ],
)
def test_references_to_models(reference: Any) -> None:
    assert from_mergekit(linear("a", models=[{"model": reference}])).models[0].model == "c+adapter"


def test_what_changes_nothing_is_accepted() -> None:
    plain = from_mergekit(ties())
    for parameters in (
        None,
        {},
        {"int8_mask": True},
        {"int8_mask": 1.0},
        {"rescale": False},
        {"normalize": 1.0},
    ):
        values = ties(parameters=parameters, chat_template="auto", modules=None, tokenizer=None)
        config = from_mergekit(values)
        assert config.values("norm", 0) == plain.values("norm", 0)
    stock = {"merge_method": "model_stock", "base_model": "x", "models": [{"model": "a"}, {"model": "b"}]}
    assert from_mergekit(stock | {"parameters": {"filter_wise": False}}) == from_mergekit(stock)
    config = from_mergekit(ties(parameters={"normalize": 0, "density": {"filter": "mlp", "value": 0.5}}))
    assert config.values("mlp", 0).shared["normalize"] is False
    assert [config.values(name, 0).per_model[0]["density"] for name in ("mlp", "norm")] == [0.5, 1.0]
