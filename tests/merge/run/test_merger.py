"""Models on disk and in memory, merged: the same numbers as by the functions, whatever the resources."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import rlhf_merge as functions
from raises import raises_error
from rlhf_merge.methods.catalog import METHODS
from rlhf_merge.run.engine import Resources
from rlhf_merge.run.merger import ModelMerger, layer_wise_interpolation

EMBEDDING, HEAD, QUERY = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.1.self_attn.q_proj.weight",
)
SMALL_BLOCK = 48

CASES: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "linear": ({"weight": 0.5}, lambda name, base, models: functions.linear(models, 0.5)),
    "task_arithmetic": (
        {"weight": 0.3, "lambda": 2.0},
        lambda name, base, models: functions.task_arithmetic(base, models, 0.3, lambda_=2.0),
    ),
    "ties": (
        {"density": 0.4, "sign": "count"},
        lambda name, base, models: functions.ties(base, models, 1.0, 0.4, sign="count"),
    ),
    "dare_linear": (
        {"density": 0.4, "seed": 5},
        lambda name, base, models: functions.dare(base, models, 1.0, 0.4, seed=5, name=name),
    ),
    "dare_ties": (
        {"density": 0.4, "rescale": False},
        lambda name, base, models: functions.dare(
            base, models, 1.0, 0.4, rescale=False, name=name, sign="mass"
        ),
    ),
    "della": (
        {"density": 0.4, "epsilon": 0.2},
        lambda name, base, models: functions.della(base, models, 1.0, 0.4, 0.2, name=name),
    ),
    "della_linear": (
        {"density": 0.4, "seed": 1},
        lambda name, base, models: functions.della(base, models, 1.0, 0.4, seed=1, name=name, sign=None),
    ),
    "breadcrumbs": (
        {"density": 0.5, "gamma": 0.1},
        lambda name, base, models: functions.breadcrumbs(base, models, 1.0, 0.5, 0.1),
    ),
    "breadcrumbs_ties": (
        {"density": 0.5, "gamma": 0.1, "normalize": True},
        lambda name, base, models: functions.breadcrumbs(
            base, models, 1.0, 0.5, 0.1, sign="mass", normalize=True
        ),
    ),
    "slerp": ({"t": 0.3}, lambda name, base, models: functions.slerp(models[0], models[1], 0.3)),
    "karcher": ({"max_iter": 3}, lambda name, base, models: functions.spherical_mean(models, max_iter=3)),
    "model_stock": ({}, lambda name, base, models: functions.model_stock(base, models)),
    "nearswap": ({"t": 0.05}, lambda name, base, models: functions.nearswap(base, models[0], 0.05)),
    "passthrough": ({"weight": 0.5}, lambda name, base, models: models[0] * 0.5),
}
"""For each method, parameters and what they must make of a tensor."""


def config_of(method: str, paths: tuple[str, str, str]) -> dict[str, Any]:
    """A config of one of the cases."""
    base, a, b = paths
    models = [a] if METHODS[method].models == (1, 1) else [a, b]
    needed = {"base": base} if METHODS[method].base == "required" else {}
    return {"method": method, "models": models, **needed, **CASES[method][0]}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_there_is_a_case_for_every_method():
    assert CASES.keys() == METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_files_are_merged_as_tensors_are(workshop: Any, method: str):
    paths = workshop.trio(torch.bfloat16)
    base, a, b = (workshop.load(path) for path in paths)
    config = config_of(method, paths)
    result = ModelMerger(config).merge(workshop.root / "out")
    models = [a] if len(config["models"]) == 1 else [a, b]
    expected = {name: CASES[method][1](name, base[name], [model[name] for model in models]) for name in base}
    found = workshop.load(result.folder)
    assert_equal(found, expected)
    assert any(not torch.equal(found[name], base[name]) for name in base)
    states = dict(zip(paths, (base, a, b), strict=True))
    assert_equal(ModelMerger(config).merge_state_dicts(states), expected)


@pytest.mark.parametrize("method", ["ties", "dare_ties", "della", "slerp", "linear"])
def test_threads_memory_and_shards_do_not_matter(workshop: Any, method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlhf_merge.methods.blocks.BLOCK", SMALL_BLOCK)
    paths = workshop.trio(torch.bfloat16)
    config = config_of(method, paths)
    one = ModelMerger(config, resources=Resources(threads=1)).merge(workshop.root / "one")
    other = ModelMerger(config, resources=Resources(threads=4, max_memory=10**11), max_shard_size=1500)
    many = other.merge(workshop.root / "many")
    assert_equal(workshop.load(many.folder), workshop.load(one.folder))
    assert many.coefficients == one.coefficients
    index = json.loads((many.folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == many.bytes_written


def test_models_in_shards_and_pickles(workshop: Any):
    base, a, b = workshop.trio(torch.bfloat16)
    config = {"method": "ties", "density": 0.5}
    expected = ModelMerger(config | {"base": base, "models": [a, b]}).merge(workshop.root / "one")
    sharded = workshop.save("sharded", workshop.load(a), shards=4)
    (workshop.root / "pickled").mkdir()
    torch.save(workshop.load(b), workshop.root / "pickled" / "pytorch_model.bin")
    models = [sharded, str(workshop.root / "pickled")]
    found = ModelMerger(config | {"base": base, "models": models}).merge(workshop.root / "two")
    assert_equal(workshop.load(found.folder), workshop.load(expected.folder))


def test_what_is_written_beside_the_weights(workshop: Any):
    base, a, b = workshop.trio(torch.bfloat16)
    (Path(base) / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (Path(base) / "generation_config.json").write_text('{"eos_token_id": 2}')
    merger = ModelMerger({"method": "ties", "base": base, "models": [a, b], "dtype": "float16"})
    counts: list[int] = []
    result = merger.merge(
        workshop.root / "out", on_bytes=counts.append, files={"notes.txt": "grüße", "more.json": "{}"}
    )
    files = workshop.files(result.folder)
    assert set(files) == {
        *("README.md", "config.json", "generation_config.json", "merge_config.yaml", "model.safetensors"),
        *("more.json", "notes.txt", "tokenizer.json"),
    }
    config = json.loads(files["config.json"])
    assert config == workshop.config(torch_dtype="float16") and files["notes.txt"].decode() == "grüße"
    plan = merger.plan()
    plan.close()
    assert (result.resumed, result.tensors) == (0, len(plan.jobs))
    assert sum(counts) == plan.bytes_read + plan.bytes_written
    assert result.bytes_written == plan.bytes_written
    assert [path.name for path in workshop.root.iterdir() if path.name.startswith(".")] == []


def test_a_link_to_an_empty_folder_is_filled(workshop: Any):
    base, a, _ = workshop.trio()
    (workshop.root / "disk").mkdir()
    (workshop.root / "out").symlink_to("disk")
    ModelMerger({"method": "linear", "models": [base, a]}).merge(workshop.root / "out")
    assert (workshop.root / "out").is_symlink()
    assert (workshop.root / "disk" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["nan", "integers"])
def test_a_failure_leaves_no_result_and_can_be_repaired(workshop: Any, kind: str):
    tensors = workshop.tensors() | {"steps": torch.arange(3)}
    base = workshop.save("base", tensors)
    broken = {name: tensor.clone() for name, tensor in tensors.items()}
    broken[QUERY][2, 3] = float("nan") if kind == "nan" else 0.0
    broken["steps"][0] = 1 if kind == "integers" else 0
    a = workshop.save("a", broken)
    merger = ModelMerger({"method": "task_arithmetic", "base": base, "models": [a]})
    expected: dict[str, Any] = {
        "nan": {"code": "non_finite_value", "model": a, "tensor": QUERY, "index": (2, 3)},
        "integers": {"code": "different_integers", "tensor": "steps"},
    }[kind]
    for _ in range(2):
        with raises_error(**expected):
            merger.merge(workshop.root / "out")
        assert not (workshop.root / "out").exists()
    save_file(tensors, Path(a) / "model.safetensors")
    assert [path.name for path in workshop.root.iterdir() if path.name.startswith(".")] == []
    result = ModelMerger({"method": "task_arithmetic", "base": base, "models": [a]}).merge(
        workshop.root / "out"
    )
    assert_equal(workshop.load(result.folder), tensors)


def test_a_mistake_is_found_before_anything_is_written(workshop: Any):
    base, a, _ = workshop.trio()
    config = {"method": "ties", "base": base, "models": [a]}
    with raises_error("max_memory_too_small"):
        ModelMerger(config, resources=Resources(max_memory=10**6)).merge(workshop.root / "new" / "out")
    other = workshop.save("other", workshop.tensors(), model_type="gpt2")
    with raises_error("different_config", key="model_type"):
        ModelMerger(config | {"models": [other]}).merge(workshop.root / "new" / "out")
    assert sorted(path.name for path in workshop.root.iterdir()) == ["a", "b", "base", "other"]


def test_configs_are_values_files_or_objects(workshop: Any):
    base, a, _ = workshop.trio()
    values = {"method": "linear", "models": [base, a]}
    (workshop.root / "c.json").write_text(json.dumps(values))
    (workshop.root / "m.json").write_text(
        json.dumps(
            {
                "merge_method": "linear",
                "models": [{"model": p, "parameters": {"weight": 1}} for p in (base, a)],
            }
        )
    )
    mergers = [ModelMerger(values), ModelMerger(str(workshop.root / "c.json"))]
    mergers += [ModelMerger(mergers[0].config), ModelMerger(workshop.root / "m.json")]
    results = [merger.merge(workshop.root / f"out{i}") for i, merger in enumerate(mergers)]
    for result in results[1:]:
        assert_equal(workshop.load(result.folder), workshop.load(results[0].folder))


@pytest.mark.parametrize("method", METHODS)
def test_slices_with_every_method(workshop: Any, method: str):
    """Two slices that take other layers of the models than of the base."""
    base, a, b = (workshop.tensors(seed, layers=4) for seed in range(3))
    names = {"base": base, "a": a, "b": b}
    paths = {name: workshop.save(name, tensors, num_hidden_layers=4) for name, tensors in names.items()}
    based, several = METHODS[method].base == "required", METHODS[method].models != (1, 1)
    ranges = [{"base": [0, 2], "a": [1, 3], "b": [2, 4]}, {"base": [3, 4], "a": [0, 1], "b": [0, 1]}]
    used = [*(["base"] if based else []), "a", *(["b"] if several else [])]
    slices = [{"sources": [{"model": paths[name], "layers": part[name]} for name in used]} for part in ranges]
    config = {"method": method, "slices": slices, **CASES[method][0]}
    config |= {"base": paths["base"]} if based else {}
    result = ModelMerger(config).merge(workshop.root / "out")
    found = workshop.load(result.folder)
    sources = [(0, 0), (0, 1), (1, 0)]  # (slice, layer of it) of each layer of the result
    assert json.loads((result.folder / "config.json").read_text())["num_hidden_layers"] == len(sources)
    names_of_layer = [name.removeprefix("model.layers.0.") for name in base if ".layers.0." in name]
    assert len(found) == len(sources) * len(names_of_layer) + 3
    for layer, (part, step) in enumerate(sources):
        for rest in names_of_layer:
            inputs = [
                names[spec][f"model.layers.{ranges[part][spec][0] + step}.{rest}"]
                for spec in ("base", "a", "b")
            ]
            name = f"model.layers.{layer}.{rest}"
            expected = CASES[method][1](name, inputs[0], inputs[1 : 3 if several else 2])
            assert torch.equal(found[name], expected), name
    for name in (EMBEDDING, HEAD):
        models = [a[name], b[name]][: 2 if several else 1]
        assert torch.equal(found[name], CASES[method][1](name, base[name], models))


def test_lora_adapters_are_merged_into_their_base(workshop: Any):
    base = workshop.tensors()
    path = workshop.save("base", base)
    generator = torch.Generator().manual_seed(1)
    down, up = torch.randn(2, 8, generator=generator), torch.randn(8, 2, generator=generator)
    folder = workshop.root / "adapter"
    folder.mkdir()
    key = f"base_model.model.{QUERY.removesuffix('.weight')}.lora_"
    save_file({f"{key}A.weight": down, f"{key}B.weight": up}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": path}))
    for spec in (f"{path}+{folder}", str(folder)):
        config = {"method": "task_arithmetic", "base": path, "models": [{"model": spec, "weight": 0.5}]}
        out = workshop.root / spec.replace("/", "_")
        found = workshop.load(ModelMerger(config).merge(out).folder)
        # Half of B A, scaled by alpha/r = 3.
        assert torch.allclose(found.pop(QUERY), base[QUERY] + 0.5 * 3 * up @ down, atol=1e-6)
        assert_equal(found, {name: tensor for name, tensor in base.items() if name != QUERY})


@pytest.mark.parametrize("order", ["untied first", "tied first"])
def test_a_head_of_its_own_among_tied_ones(workshop: Any, order: str):
    tied, untied = workshop.tensors(tied=True), workshop.tensors(1)
    paths = [
        workshop.save("tied", tied, tie_word_embeddings=True),
        workshop.save("untied", untied, tie_word_embeddings=False),
    ]
    paths = paths if order == "tied first" else paths[::-1]
    result = ModelMerger({"method": "linear", "models": paths}).merge(workshop.root / "out")
    found = workshop.load(result.folder)
    models = [tied[EMBEDDING], untied[HEAD]]
    expected = functions.linear(models if order == "tied first" else models[::-1])
    assert torch.equal(found[HEAD], expected)
    assert json.loads((result.folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_state_dicts_refused():
    state = {"w": torch.ones(2)}
    merger = ModelMerger({"method": "linear", "models": ["a", "b"]})
    with raises_error("missing_state_dict", model="b"):
        merger.merge_state_dicts({"a": state})
    with raises_error("missing_state_dict", model="a"):
        merger.merge_state_dicts({})
    with raises_error("missing_tensor", tensor="w", model="b"):
        merger.merge_state_dicts({"a": state, "b": {}})
    with raises_error("different_shapes", tensor="w"):
        merger.merge_state_dicts({"a": state, "b": {"w": torch.ones(3)}})
    united = ModelMerger({"method": "linear", "models": ["a", "b"], "vocab": "union"})
    with raises_error("unsupported_for_state_dicts"):
        united.merge_state_dicts({"a": state, "b": state})


def test_state_dicts_keep_their_inputs_and_types():
    first = {"w": torch.ones(2, 3, requires_grad=True), "ids": torch.arange(3)}
    second = {"w": torch.zeros(3, 2).T.bfloat16(), "ids": torch.arange(3)}
    merged = ModelMerger({"method": "linear", "models": ["a", "b"]}).merge_state_dicts(
        {"a": first, "b": second}
    )
    assert torch.equal(merged["w"], torch.full((2, 3), 0.5)) and not merged["w"].requires_grad
    assert torch.equal(merged["ids"], torch.arange(3))
    assert torch.equal(first["w"], torch.ones(2, 3))


LAYERS = [f"layers.{i}.{part}" for i in range(3) for part in ("attn.w", "mlp.w")]


def test_layer_wise_interpolation():
    names = ["embed.w", *LAYERS, "head.w"]
    first, second = ({name: torch.full((2,), value) for name in names} for value in (0.0, 4.0))

    def found(t: Any) -> list[float]:
        result = layer_wise_interpolation(first, second, t)
        assert list(result) == names
        return [float(tensor[0]) for tensor in result.values()]

    assert found(0.25) == [1] * 8
    # 4t of the layers' depths 0, 1/2, 1; outside of the layers as at depth 0.
    assert found([0.25, 0.75]) == [1, 1, 1, 2, 2, 3, 3, 1]
    assert found({"attn": [0, 1], "mlp": 0.5, "*": 1.0}) == [4, 0, 2, 2, 2, 4, 2, 4]
    assert torch.equal(layer_wise_interpolation(first, second)["head.w"], torch.full((2,), 2.0))


def test_layer_wise_interpolation_keeps_equal_models_and_integers():
    generator = torch.Generator().manual_seed(0)
    state = {"layers.0.w": torch.randn(50, generator=generator).bfloat16(), "ids": torch.arange(4)}
    result = layer_wise_interpolation(state, state, 0.3)
    assert_equal(result, state)
    assert result["ids"] is not state["ids"]


def test_layer_wise_interpolation_refused():
    state = {"layers.0.w": torch.ones(2), "ids": torch.arange(2)}
    with raises_error("invalid_value", key="t"):
        layer_wise_interpolation(state, state, 1.5)
    with raises_error("missing_value", key="t"):
        layer_wise_interpolation(state, state, {"layers": 0.5})
    with raises_error("missing_tensor", tensor="ids"):
        layer_wise_interpolation(state, {"layers.0.w": torch.ones(2)})
    with raises_error("different_integers", tensor="ids"):
        layer_wise_interpolation(state, state | {"ids": torch.tensor([0, 2])})
    with raises_error("different_shapes", tensor="layers.0.w"):
        layer_wise_interpolation(state, state | {"layers.0.w": torch.ones(3)})
