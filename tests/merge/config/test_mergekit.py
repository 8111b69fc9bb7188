"""Configs of mergekit's schema: examples of its documentation, what they come to, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.config.reading import parse_yaml
from rlhf_merge.methods.families import METHODS

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


SHORT = {
    "<ties>": "merge_method: ties, base_model: x, models: [<a1>, <b2>]",
    "<a1>": "{model: a, parameters: {weight: 1}}",
    "<b2>": "{model: b, parameters: {weight: 2}}",
    "<to>": "merge_method: ties, base_model: x, models",
    "<lin>": "merge_method: linear, parameters: {weight: 1}",
    "<one>": "merge_method: linear, models: [{model: a}]",
    "<stock>": "merge_method: model_stock, base_model: x, models",
    "<slerp>": "merge_method: slerp, parameters: {t: 0.3}",
    "<cut>": "merge_method: ties, parameters: {weight: 1}, slices",
    **{f"<{name}>": f"{{model: {name}, layer_range: [0, 4]}}" for name in "abxy"},
}
"""What stands for longer text in flow style YAML."""


def plain(text: str) -> Any:
    for short, full in SHORT.items():
        text = text.replace(short, full)
    return parse_yaml(text)


def read(text: str) -> MergeConfig:
    return from_mergekit(plain(text), "mergekit.yml")


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
    scale = "[{filter: o_proj, value: 0}, {filter: down_proj, value: 0}, {value: 1}]"
    sources = "[{model: a, layer_range: [8, 9]}]"
    config = read(
        f"merge_method: passthrough\nslices: [{{sources: {sources}, parameters: {{scale: {scale}}}}}]"
    )
    for name, weight in (("down_proj", 0), ("up_proj", 1)):
        assert config.values(f"layers.0.mlp.{name}", 1, 0).per_model == ({"weight": weight},)


def test_it_is_the_config_of_our_schema() -> None:
    theirs = "{<ties>, parameters: {density: 0.5, lambda: 2}, tokenizer_source: union, out_dtype: bfloat16}"
    models = [{"model": "a", "weight": 1}, {"model": "b", "weight": 2}]
    ours = {"method": "ties", "base": "x", "models": models, "density": 0.5, "lambda": 2}
    assert read(theirs) == MergeConfig.from_dict(ours | {"dtype": "bfloat16", "vocab": "union"})


# From mergekit 0.1.5, merge_methods/registry.py, generalized_task_arithmetic.py, linear.py and karcher.py:
# what they take when nothing is said. Their rescale is also off where it is not listed, as ours is. All that
# elect signs do so by the sum of the task vectors, its ConsensusMethod.sum.
SUM = {"normalize": False, "lambda": 1.0}
MERGEKIT_DEFAULTS: dict[str, dict[str, Any]] = {
    "linear": {"normalize": True},
    "task_arithmetic": SUM,
    "ties": SUM | {"normalize": True, "density": 1.0, "sign": "mass"},
    "dare_ties": SUM | {"rescale": True, "density": 1.0, "sign": "mass"},
    "dare_linear": SUM | {"rescale": True, "density": 1.0},
    "breadcrumbs": SUM | {"density": 1.0, "gamma": 0.01},
    "breadcrumbs_ties": SUM | {"density": 1.0, "gamma": 0.01, "sign": "mass"},
    "della": SUM | {"normalize": True, "rescale": True, "density": 1.0, "epsilon": 0.15, "sign": "mass"},
    "della_linear": SUM | {"rescale": True, "density": 1.0, "epsilon": 0.15},
    "karcher": {"max_iter": 10, "tol": 1e-5},
    "passthrough": {},
    "model_stock": {},
}


@pytest.mark.parametrize("method", MERGEKIT_DEFAULTS)
def test_defaults_are_mergekits(method: str) -> None:
    weighted = {} if method in ("model_stock", "karcher", "passthrough") else {"parameters": {"weight": 1}}
    models = [{"model": model} | weighted for model in "ab"[: METHODS[method].models[1]]]
    base = {"base_model": "base"} if METHODS[method].base == "required" else {}
    values = from_mergekit({"merge_method": method, "models": models, **base}).values("w", 0.0)
    ours = values.shared | values.per_model[0]
    assert {k: v for k, v in ours.items() if k != "weight"} == MERGEKIT_DEFAULTS[method]


def merged(text: str, *slices: int) -> list[list[str]]:
    """The models that are merged, the base not among them where the method has one."""
    config = read(text)
    return [[entry.model for entry in config.merged(index)] for index in slices or [None]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # slerp runs from the base to the other.
        ("{<slerp>, base_model: x, models: [{model: x}, {model: o}]}", ["x", "o"]),
        ("{<slerp>, base_model: x, models: [{model: o}, {model: x}]}", ["x", "o"]),
        ("{<slerp>, base_model: x, models: [{model: o}]}", ["x", "o"]),
        # A mean has the base among its models; mergekit adds one that is not listed, behind the others.
        ("{<lin>, base_model: x, models: [{model: x}, {model: a}]}", ["x", "a"]),
        ("{<lin>, base_model: x, models: [{model: a}]}", ["a", "x"]),
        ("{merge_method: karcher, base_model: x, models: [{model: a}]}", ["a", "x"]),
        # References.
        ("{<lin>, models: [{model: c+adapter}]}", ["c+adapter"]),
        ("{<lin>, models: [{model: {path: c+adapter}}]}", ["c+adapter"]),
        ("{<lin>, models: [{model: {model: c+adapter}}]}", ["c+adapter"]),
        ("{<lin>, models: [{model: {model: {path: c+adapter}, lora: null}}]}", ["c+adapter"]),
    ],
)
def test_which_models_are_merged(text: str, expected: list[str]) -> None:
    assert merged(text) == [expected]


def test_slerp_of_slices_runs_from_the_slices_base() -> None:
    parts = "[{sources: [<b>, <a>]}, {sources: [<a>, <b>], base_model: b}]"
    assert merged(f"{{<slerp>, base_model: a, slices: {parts}}}", 0, 1) == [["a", "b"], ["b", "a"]]


def test_a_base_among_the_models_is_left_out_of_task_vectors_and_its_weight_ignored() -> None:
    nine = "{model: x, parameters: {weight: 9}}"
    with_base = f"{{merge_method: ties, base_model: x, models: [{nine}, <a1>, <b2>]}}"
    assert read(with_base) == read("{<ties>}")
    ranged = nine.replace("parameters", "layer_range: [0, 4], parameters")
    config = read("{<cut>: [{sources: [<a>, <x>]}], base_model: x}")
    assert config == read(f"{{<cut>: [{{sources: [<a>, {ranged}]}}], base_model: x}}")
    assert [source.model for source in config.merged(0)] == ["a"]


def test_each_slice_may_name_its_own_base() -> None:
    weighed = "{model: a, layer_range: [0, 4], parameters: {weight: 0.5}}"
    parts = ", ".join(f"{{sources: [<{base}>, {weighed}], base_model: {base}}}" for base in "xy")
    text = f"{{merge_method: ties, slices: [{parts}]}}"
    config = read(text)
    assert (config.base, config.slices[0].base, config.slices[1].base) == ("x", "x", "y")
    assert merged(text, 0, 1) == [["a"], ["a"]]


@pytest.mark.parametrize(
    ("keys", "dtype", "vocab"),
    [
        ("", None, None),
        (", dtype: float32", "float32", None),
        (", dtype: float32, out_dtype: bfloat16", "bfloat16", None),
        (", dtype: torch.float16, out_dtype: null", "float16", None),
        (", tokenizer_source: base", None, "base"),
        (", tokenizer_source: b", None, "b"),
        (", tokenizer_source: {model: {path: b}}", None, "b"),
        (", tokenizer: {source: base, tokens: null, pad_to_multiple_of: null}", None, "base"),
        (", tokenizer: {}", None, "union"),
        (", tokenizer_source: null, tokenizer: {source: union, tokens: {}}", None, "union"),
    ],
)
def test_the_type_and_the_vocabulary_of_the_output(keys: str, dtype: str | None, vocab: str | None) -> None:
    config = read(f"{{<ties>{keys}}}")
    assert (config.dtype, config.vocab) == (dtype, vocab)


@pytest.mark.parametrize(
    "parameters",
    ["null", "{}", "{int8_mask: true}", "{int8_mask: 1.0}", "{rescale: false}", "{normalize: 1.0}"],
)
def test_what_changes_nothing_is_accepted(parameters: str) -> None:
    others = "chat_template: auto, modules: null, tokenizer: null"
    config = read(f"{{<ties>, parameters: {parameters}, {others}}}")
    assert config.values("norm", 0) == read("{<ties>}").values("norm", 0)


def test_switches_and_rules_in_mergekits_forms() -> None:
    stock = "merge_method: model_stock, base_model: x, models: [{model: a}, {model: b}]"
    assert read(f"{{{stock}, parameters: {{filter_wise: false}}}}") == read(f"{{{stock}}}")
    config = read("{<ties>, parameters: {normalize: 0, density: {filter: mlp, value: 0.5}}}")
    assert config.values("mlp", 0).shared["normalize"] is False
    assert [config.values(name, 0).of("density")[0] for name in ("mlp", "norm")] == [0.5, 1.0]


REFUSALS = """
[]                                               | invalid_value |
{merge_method: sce, models: [<a1>]}              | invalid_value | merge_method
{merge_method: dare-ties, models: [<a1>]}        | invalid_value | merge_method
{merge_method: null, models: [<a1>]}             | invalid_value | merge_method
{<ties>, base_modle: x}                          | unknown_key | base_modle
{<ties>, random_seed: 0}                         | unknown_key | random_seed
{<ties>, modules: {text: {}}}                    | invalid_value | modules
{<ties>, slices: [{sources: [<a>]}]}             | conflicting_options | models
{merge_method: ties, base_model: x}              | conflicting_options | models
{<ties>, chat_template: chatml}                  | invalid_value | chat_template
{<ties>, dtype: int64}                           | invalid_value | dtype
{<ties>, dtype: float16, out_dtype: fp8}         | invalid_value | out_dtype
{<ties>, tokenizer: {source: base}, tokenizer_source: base} | conflicting_options | tokenizer
{<ties>, tokenizer: {tokens: {'<x>': {}}}}       | invalid_value | tokenizer.tokens
{<ties>, tokenizer: {pad_to_multiple_of: 8}}     | invalid_value | tokenizer.pad_to_multiple_of
{<ties>, tokenizer: {soruce: base}}              | unknown_key | tokenizer.soruce
{<ties>, tokenizer_source: else}                 | invalid_value | vocab
{<lin>, models: [{model: a}], tokenizer_source: base} | missing_value | base
{merge_method: ties, base_model: {model: a, lora: l}} | invalid_value | base_model
{merge_method: ties, base_model: {model: {path: a, revision: r}}} | invalid_value | base_model
{merge_method: ties, base_model: {name: a}}      | invalid_value | base_model
{<lin>, models: [{model: 3}]}                    | invalid_value | models[0].model
{<lin>, models: [a]}                             | invalid_value | models[0]
{<lin>, models: [{parameters: {}}]}              | missing_key | models[0].model
{<lin>, models: [{model: a, weight: 1}]}         | unknown_key | models[0].weight
{<to>: [{model: x}]}                             | wrong_model_count | models
{merge_method: ties, models: [<a1>]}             | missing_value | base_model
{<cut>: [{sources: [<a>], base_model: x}, {sources: [<a>]}]} | missing_value | base_model
{<cut>: [{sources: [<a>]}], base_model: x}       | repeated_model | slices[0]
{<cut>: [{sources: [<a>], residual_weight: 0.1}], base_model: x} | unknown_key | slices[0].residual_weight
{<cut>: [{sources: [{model: a}]}], base_model: x} | missing_key | slices[0].sources[0].layer_range
{<cut>: [{sources: [{model: a, layer_range: [4, 0]}]}]} | invalid_value | slices[0].sources[0].layer_range
{<cut>: [{parameters: {}}], base_model: x}       | missing_key | slices[0].sources
{<lin>, slices: [{sources: [<a>], base_model: a}]} | repeated_model | slices[0]
{<slerp>, models: [{model: a}, {model: b}]}      | missing_value | base_model
{<slerp>, models: [{model: a}, {model: b}], base_model: c} | wrong_model_count | models
{<slerp>, slices: [{sources: [<a>, <b>]}], base_model: c} | missing_value | slices[0].sources
{merge_method: passthrough, models: [{model: a}], base_model: c} | wrong_model_count | base_model
{<to>: [{model: a}]}                             | missing_value | weight
{<one>, parameters: {weight: {filter: mlp, value: 1}}} | missing_value | weight
{<one>}                                          | missing_value | weight
{merge_method: linear, models: [<a1>], base_model: c} | missing_value | weight
{merge_method: slerp, models: [{model: a}], base_model: c} | missing_value | t
{merge_method: nearswap, models: [{model: a}], base_model: c} | missing_value | t
{<ties>, parameters: {densty: 1}}                | unknown_key | densty
{<ties>, parameters: {nuslerp_flatten: false}}   | unknown_key | nuslerp_flatten
{<ties>, parameters: {t: 1}}                     | unknown_key | parameters.t
{<ties>, parameters: {sign: count}}              | unknown_key | parameters.sign
{<ties>, parameters: {rescale: true}}            | unknown_key | parameters.rescale
{<ties>, parameters: {int8_mask: 'yes'}}         | invalid_value | parameters.int8_mask
{<ties>, parameters: {normalize: 2}}             | invalid_value | normalize
{<ties>, parameters: {density: 1.5}}             | invalid_value | density
{<lin>, models: [{model: a, parameters: {weight: [1, x]}}]} | invalid_value | models[0].weight[1]
{<ties>, parameters: {density: [{pattern: mlp, value: 1}]}} | invalid_value | density[0]
{<ties>, parameters: {density: {mlp: 1}}}        | invalid_value | density[0]
{<to>: [{model: a, parameters: {weight: 1, lambda: 1}}]} | misplaced_parameter | models[0].lambda
{merge_method: karcher, models: [{model: a}], parameters: {weight: 1}} | unknown_key | parameters.weight
{<stock>: [<a1>, <b2>]}                          | unknown_key | models[0].parameters.weight
{<stock>: [{model: a}], parameters: {filter_wise: true}} | unknown_key | parameters.filter_wise
{merge_method: passthrough, models: [{model: a}], parameters: {weight: 1}} | unknown_key | parameters.weight
{<ties>, parameters: [1]}                        | invalid_value | parameters
{<ties>, parameters: []}                         | invalid_value | parameters
"""


@pytest.mark.parametrize("line", REFUSALS.strip().splitlines())
def test_a_mistake_is_refused_in_one_sentence_that_names_it(line: str) -> None:
    text, code, key = (part.strip() for part in line.split("|"))
    with raises_error(code, key=key or "") as error:
        read(text)
    assert str(error.value).startswith("mergekit.yml: ") and "\n" not in str(error.value)
