"""What a config of mergekit's schema is refused for, by its message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError

from_mergekit = MergeConfig.from_mergekit


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


REFUSALS = [
    ([], "the top level is [], expected a mapping"),
    (ties(merge_method="sce"), "merge_method is 'sce'"),
    (ties(merge_method="dare-ties"), "merge_method is 'dare-ties'"),
    (ties(merge_method=None), "merge_method is None"),
    (ties(base_modle="x"), "unknown key base_modle; did"),
    (ties(random_seed=0), "unknown key random_seed"),
    (ties(modules={"text": {}}), "modules is {'text': {}}, expected nothing, as it is not supported"),
    (ties(slices=[part("a")]), "a config has either models or slices; give one of them"),
    (ties(models=None), "a config has either models or slices; give one of them"),
    (ties(chat_template="chatml"), "chat_template is 'chatml'"),
    (ties(dtype="int64"), "dtype is 'int64', expected float32, float16, bfloat16 or float64"),
    (ties(dtype="float16", out_dtype="fp8"), "out_dtype is 'fp8', expected float32"),
    # Tokenizers.
    (ties(tokenizer={"source": "base"}, tokenizer_source="base"), "tokenizer and tokenizer_source say the"),
    (ties(tokenizer={"tokens": {"<x>": {}}}), "tokenizer.tokens is {'<x>': {}}, expected nothing"),
    (ties(tokenizer={"pad_to_multiple_of": 8}), "tokenizer.pad_to_multiple_of is 8, expected nothing"),
    (ties(tokenizer={"soruce": "base"}), "tokenizer: unknown key soruce"),
    (ties(tokenizer_source="else"), "vocab is 'else', expected union, truncate, base or"),
    (linear("a", tokenizer_source="base"), "is to be the base's, but no base is given"),
    # References.
    (ties(base_model={"model": "a", "lora": "l"}), "expected one text such as base+adapter: lora is not"),
    (ties(base_model={"model": {"path": "a", "revision": "r"}}), "base+adapter: revision is not supported"),
    (ties(base_model={"name": "a"}), "base_model is {'name': 'a'}, expected"),
    (ties(models=[{"model": 3}]), "models[0].model is 3, expected"),
    # Models and slices.
    (ties(models=["a"]), "models[0] is 'a', expected a mapping"),
    (ties(models=[{"parameters": {}}]), "models[0] has no model; give it one"),
    (ties(models=[{"model": "a", "weight": 1}]), "models[0]: unknown key weight"),
    (ties(models=[{"model": "base"}]), "models holds nothing but the base model base; add the models"),
    (ties(base_model=None), "base_model is missing, which ties needs"),
    (slices(part("a", base_model="x"), part("a")), "base_model is missing, which ties needs"),
    (slices(part("a"), base_model="x"), "slices[0].sources lists the base x 0 times"),
    (slices(part("a", residual_weight=0.1), base_model="x"), "slices[0]: unknown key residual_weight"),
    (slices({"sources": [{"model": "a"}]}, base_model="x"), "slices[0].sources[0] has no layer_range;"),
    (
        slices({"sources": [{"model": "a", "layer_range": [4, 0]}]}, base_model="x"),
        "slices[0].sources[0].layer_range is [4, 0], expected two whole numbers",
    ),
    (slices({"parameters": {}}, base_model="x"), "slices[0] has no sources"),
    (slices(part("a", base_model="a"), merge_method="linear"), "slices[0] has a base of its own, which"),
    # slerp and passthrough.
    (linear("a", "b", merge_method="slerp", parameters={"t": 1}), "base_model is missing, which slerp needs"),
    (
        linear("a", "b", merge_method="slerp", parameters={"t": 1}, base_model="c"),
        "models holds 3, but slerp merges 2 models; remove some",
    ),
    (
        slices(part("a", "b"), merge_method="slerp", parameters={"t": 1}, base_model="c"),
        "slices[0].sources lacks the base model c, where slerp starts",
    ),
    (linear("a", merge_method="passthrough", parameters={}, base_model="c"), "passthrough takes one"),
    # What mergekit has no default for.
    (ties(models=[{"model": "a"}]), "a has no weight for some tensors"),
    (
        ties(models=[{"model": "a", "parameters": {"weight": {"filter": "mlp", "value": 1}}}]),
        "a has no weight for some tensors",
    ),
    (linear("a", parameters={}), "a has no weight for some tensors"),
    (
        linear("a", models=[{"model": "a", "parameters": {"weight": 1}}], parameters={}, base_model="c"),
        "c has no weight for some tensors",
    ),
    (linear("a", merge_method="slerp", base_model="c", parameters={}), "the merge has no t for some tensors"),
    (
        linear("a", merge_method="nearswap", base_model="c", parameters={}),
        "the merge has no t for some tensors",
    ),
    # Parameters.
    (ties(parameters={"densty": 1}), "parameters: unknown key densty"),
    (ties(parameters={"nuslerp_flatten": False}), "parameters: unknown key nuslerp_flatten"),
    (ties(parameters={"t": 1}), "parameters.t: ties has no parameter t in mergekit; it takes weight,"),
    (ties(parameters={"sign": "count"}), "parameters.sign: ties has no parameter sign in mergekit"),
    (ties(parameters={"rescale": True}), "parameters.rescale is True, but ties has no such switch here"),
    (ties(parameters={"int8_mask": "yes"}), "parameters.int8_mask is 'yes', expected"),
    (ties(parameters={"normalize": 2}), "parameters.normalize is 2, expected"),
    (ties(parameters={"density": 1.5}), "parameters.density is 1.5, expected"),
    (ties(models=[{"model": "a", "parameters": {"weight": [1, "x"]}}]), "models[0].parameters.weight[1]"),
    (ties(parameters={"density": [{"pattern": "mlp", "value": 1}]}), "parameters.density[0] is"),
    (ties(parameters={"density": {"mlp": 1}}), "parameters.density[0] is"),
    (ties(models=[{"model": "a", "parameters": {"weight": 1, "lambda": 1}}]), "models[0].lambda: lambda"),
    (linear("a", merge_method="karcher"), "parameters.weight: karcher has no parameter weight in mergekit"),
    (
        {"merge_method": "model_stock", "base_model": "x", "models": [{"model": "a"}, {"model": "b"}]}
        | {"parameters": {"filter_wise": True}},
        "parameters.filter_wise is True, but model_stock has no such switch here",
    ),
    (linear("a", merge_method="passthrough"), "parameters.weight: passthrough has no parameter weight in"),
    (ties(parameters=[1]), "parameters is [1], expected a mapping"),
    (ties(parameters=[]), "parameters is [], expected a mapping"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS)
def test_a_mistake_is_refused_in_one_sentence_that_names_it(values: Any, message: str) -> None:
    with pytest.raises(MergeError) as error:
        from_mergekit(values, "mergekit.yml")
    assert str(error.value).startswith("mergekit.yml: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_of_mergekit_moe_is_said_to_be_another_thing(tmp_path: Path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("base_model: a\ngate_mode: random\nexperts: [{source_model: b}]\n")
    with raises_error("unsupported_config"):
        MergeConfig.from_file(path)
