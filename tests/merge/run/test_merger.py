"""Models on disk and in memory, merged: the same numbers as by the functions, whatever the resources."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import rlhf_merge as ours
from proofs import by_default
from raises import raises_error
from rlhf_merge.methods.families import METHODS
from rlhf_merge.run.merger import ModelMerger, Resources, layer_wise_interpolation

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"

Merge = Callable[[str, Tensor, list[Tensor]], Tensor]
CASES: dict[str, tuple[dict[str, Any], Merge]] = {
    "linear": ({"weight": 0.5}, lambda n, b, m: ours.linear(m, 0.5)),
    "task_arithmetic": (
        {"weight": 0.3, "lambda": 2.0},
        lambda n, b, m: ours.task_arithmetic(b, m, 0.3, lambda_=2.0),
    ),
    "ties": ({"density": 0.4, "sign": "count"}, lambda n, b, m: ours.ties(b, m, 1.0, 0.4, sign="count")),
    "dare_linear": (
        {"density": 0.4, "seed": 5},
        lambda n, b, m: ours.dare(b, m, 1.0, 0.4, seed=5, name=n),
    ),
    "dare_ties": (
        {"density": 0.4, "rescale": False},
        lambda n, b, m: ours.dare(b, m, 1.0, 0.4, rescale=False, name=n, sign="mass"),
    ),
    "della": ({"density": 0.4, "epsilon": 0.2}, lambda n, b, m: ours.della(b, m, 1.0, 0.4, 0.2, name=n)),
    "della_linear": (
        {"density": 0.4, "seed": 1},
        lambda n, b, m: ours.della(b, m, 1.0, 0.4, seed=1, name=n, sign=None),
    ),
    "breadcrumbs": ({"density": 0.5, "gamma": 0.1}, lambda n, b, m: ours.breadcrumbs(b, m, 1.0, 0.5, 0.1)),
    "breadcrumbs_ties": (
        {"density": 0.5, "gamma": 0.1, "normalize": True},
        lambda n, b, m: ours.breadcrumbs(b, m, 1.0, 0.5, 0.1, sign="mass", normalize=True),
    ),
    "slerp": ({"t": 0.3}, lambda n, b, m: ours.slerp(m[0], m[1], 0.3)),
    "karcher": ({"max_iter": 3}, lambda n, b, m: ours.spherical_mean(m, max_iter=3)),
    "model_stock": ({}, lambda n, b, m: ours.model_stock(b, m)),
    "nearswap": ({"t": 0.05}, lambda n, b, m: ours.nearswap(b, m[0], 0.05)),
    "passthrough": ({"weight": 0.5}, lambda n, b, m: m[0] * 0.5),
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


@pytest.mark.parametrize("method", by_default(METHODS, "ties", "dare_linear", "slerp", "passthrough"))
def test_files_are_merged_as_tensors_are(workshop: Any, method: str) -> None:
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


@pytest.mark.parametrize(
    "method", by_default(["ties", "dare_ties", "della", "slerp", "linear"], "dare_ties", "slerp")
)
def test_threads_memory_and_files_do_not_matter(
    workshop: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in how many files the models are, nor of which kind."""
    monkeypatch.setattr("rlhf_merge.methods.blocks.BLOCK", 48)
    base, a, b = workshop.trio(torch.bfloat16)
    merger = ModelMerger(config_of(method, (base, a, b)), resources=Resources(threads=1))
    one = merger.merge(workshop.root / "one")
    sharded = workshop.save("sharded", workshop.load(a), shards=4)
    (workshop.root / "pickled").mkdir()
    torch.save(workshop.load(b), workshop.root / "pickled" / "pytorch_model.bin")
    config = config_of(method, (base, sharded, str(workshop.root / "pickled")))
    resources = Resources(threads=4, max_memory=10**11)
    many = ModelMerger(config, resources=resources, max_shard_size=1500).merge(workshop.root / "many")
    assert_equal(workshop.load(many.folder), workshop.load(one.folder))
    assert many.coefficients == one.coefficients
    index = json.loads((many.folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == many.bytes_written


def test_what_is_written_beside_the_weights(workshop: Any) -> None:
    base, a, b = workshop.trio(torch.bfloat16)
    (Path(base) / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (Path(base) / "generation_config.json").write_text('{"eos_token_id": 2}')
    (workshop.root / "disk").mkdir()
    (workshop.root / "out").symlink_to("disk")  # a link to an empty folder is filled
    merger = ModelMerger({"method": "ties", "base": base, "models": [a, b], "dtype": "float16"})
    notes = {"notes.txt": "grüße", "more.json": "{}"}
    result = merger.merge(workshop.root / "out", files=notes)
    files = workshop.files(workshop.root / "disk")
    assert set(files) == {
        *("README.md", "config.json", "generation_config.json", "merge_config.yaml", "model.safetensors"),
        *("tokenizer.json", *notes),
    }
    config = json.loads(files["config.json"])
    assert config == workshop.config(torch_dtype="float16") and files["notes.txt"].decode() == "grüße"
    plan = merger.plan()
    plan.close()
    assert (result.resumed, result.tensors) == (0, len(plan.jobs))
    assert result.bytes_written == plan.bytes_written and (workshop.root / "out").is_symlink()
    assert [path.name for path in workshop.root.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("kind", ["nan", "integers"])
def test_a_failure_leaves_no_result_and_can_be_repaired(workshop: Any, kind: str) -> None:
    tensors = workshop.tensors() | {"steps": torch.arange(3)}
    base = workshop.save("base", tensors)
    broken = {name: tensor.clone() for name, tensor in tensors.items()}
    broken[QUERY][2, 3] = float("nan") if kind == "nan" else 0.0
    broken["steps"][0] = 1 if kind == "integers" else 0
    a = workshop.save("a", broken)
    config = {"method": "task_arithmetic", "base": base, "models": [a]}
    expected: dict[str, Any] = {
        "nan": {"code": "non_finite_value", "model": a, "tensor": QUERY, "index": (2, 3)},
        "integers": {"code": "different_integers", "tensor": "steps"},
    }[kind]
    for _ in range(2):
        with raises_error(**expected):
            ModelMerger(config).merge(workshop.root / "out")
    save_file(tensors, Path(a) / "model.safetensors")
    assert sorted(path.name for path in workshop.root.iterdir()) == ["a", "base"]
    assert_equal(workshop.load(ModelMerger(config).merge(workshop.root / "out").folder), tensors)


def test_a_mistake_is_found_before_anything_is_written(workshop: Any) -> None:
    base, a, _ = workshop.trio()
    other = workshop.save("other", workshop.tensors(), model_type="gpt2")
    before, new = workshop.files(workshop.root), workshop.root / "new" / "out"
    for models, out, resources, code in (
        ([a], new, Resources(max_memory=10**6), "max_memory_too_small"),
        ([other], new, None, "different_config"),
        ([a], Path(a) / "merged", None, "output_inside_model"),
        ([a], Path(a) / ".." / "base" / "deep" / "merged", None, "output_inside_model"),
    ):
        with raises_error(code):
            config = {"method": "ties", "base": base, "models": models}
            ModelMerger(config, resources=resources).merge(out)
        assert workshop.files(workshop.root) == before and not new.parent.exists()


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"],
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_than_a_file_in_a_models_folder(
    workshop: Any, name: str, make: Callable[[Path], None]
) -> None:
    a, b = workshop.save("a", workshop.tensors()), workshop.save("b", workshop.tensors(1))
    path = Path(a) / name
    path.unlink(missing_ok=True)
    make(path)
    with raises_error("not_a_regular_file", path=str(path)):
        ModelMerger({"method": "linear", "models": [a, b]}).merge(workshop.root / "out")


@pytest.mark.parametrize("method", by_default(METHODS, "ties", "dare_linear", "slerp", "passthrough"))
def test_slices_with_every_method(workshop: Any, method: str) -> None:
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
    rests = [name.removeprefix("model.layers.0.") for name in base if ".layers.0." in name]
    assert len(found) == len(sources) * len(rests) + 3
    for layer, (part, step) in enumerate(sources):
        for rest in rests:
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


def test_lora_adapters_are_merged_into_their_base(workshop: Any) -> None:
    base = workshop.tensors()
    path = workshop.save("base", base)
    generator = torch.Generator().manual_seed(1)
    down, up = torch.randn(2, 8, generator=generator), torch.randn(8, 2, generator=generator)
    key = QUERY.removesuffix(".weight")
    parts = {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    folder = workshop.adapter("adapter", parts, r=2, lora_alpha=6, base_model_name_or_path=path)
    for spec in (f"{path}+{folder}", folder):
        config = {"method": "task_arithmetic", "base": path, "models": [{"model": spec, "weight": 0.5}]}
        found = workshop.load(ModelMerger(config).merge(workshop.root / spec.replace("/", "_")).folder)
        # Half of B A, scaled by alpha/r = 3.
        assert torch.allclose(found.pop(QUERY), base[QUERY] + 0.5 * 3 * up @ down, atol=1e-6)
        assert_equal(found, {name: tensor for name, tensor in base.items() if name != QUERY})


STATE = {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("states", "values", "code", "fields"),
    [
        ({"a": STATE}, {}, "missing_state_dict", {"model": "b"}),
        ({}, {}, "missing_state_dict", {"model": "a"}),
        ({"a": STATE, "b": {}}, {}, "missing_tensor", {"tensor": "w", "model": "b"}),
        ({"a": STATE, "b": {"w": torch.ones(3)}}, {}, "different_shapes", {"tensor": "w"}),
        ({"a": STATE, "b": STATE}, {"vocab": "union"}, "unsupported_for_state_dicts", {}),
        ({"a": STATE, "b": STATE}, {"ignore": ["w"]}, "ignored_common_tensor", {"tensor": "w"}),
    ],
)
def test_state_dicts_refused(
    states: dict[str, dict[str, Tensor]], values: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises_error(code, **fields):
        ModelMerger({"method": "linear", "models": ["a", "b"]} | values).merge_state_dicts(states)


def test_state_dicts_keep_their_inputs_and_types() -> None:
    first = {"w": torch.ones(2, 3, requires_grad=True), "ids": torch.arange(3)}
    second = {"w": torch.zeros(3, 2).T.bfloat16(), "ids": torch.arange(3), "v_head.w": torch.ones(1)}
    merger = ModelMerger({"method": "linear", "models": ["a", "b"], "ignore": ["v_head.*"]})
    merged = merger.merge_state_dicts({"a": first, "b": second})
    assert not merged["w"].requires_grad
    assert_equal(merged, {"w": torch.full((2, 3), 0.5), "ids": torch.arange(3)})
    assert torch.equal(first["w"], torch.ones(2, 3))


LAYERS = [f"layers.{i}.{part}" for i in range(3) for part in ("attn.w", "mlp.w")]


def test_layer_wise_interpolation() -> None:
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
    state = {"layers.0.w": torch.randn(50).bfloat16(), "ids": torch.arange(4)}
    result = layer_wise_interpolation(state, state, 0.3)
    assert_equal(result, state)
    assert result["ids"] is not state["ids"]


@pytest.mark.parametrize(
    ("changes", "t", "code", "fields"),
    [
        ({}, 1.5, "invalid_value", {"key": "t"}),
        ({}, {"layers": 0.5}, "missing_value", {"key": "t"}),
        ({"more": torch.ones(1)}, 0.5, "missing_tensor", {"tensor": "more"}),
        ({"ids": torch.tensor([0, 2])}, 0.5, "different_integers", {"tensor": "ids"}),
        ({"layers.0.w": torch.ones(3)}, 0.5, "different_shapes", {"tensor": "layers.0.w"}),
    ],
)
def test_layer_wise_interpolation_refused(
    changes: dict[str, Tensor], t: Any, code: str, fields: dict[str, Any]
) -> None:
    state = {"layers.0.w": torch.ones(2), "ids": torch.arange(2)}
    with raises_error(code, **fields):
        layer_wise_interpolation(state, state | changes, t)
