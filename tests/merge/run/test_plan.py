"""What is decided before a merge begins: sources, inputs, types, sizes, and what does not fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raises import raises_error
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.files.checkpoint import open_checkpoint
from rlhf_merge.run.plan import MergePlan, SourceNames, make_plan, source_names

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def planned(method: str, models: list[Any], /, **values: Any) -> MergePlan:
    limit = values.pop("max_shard_size", 10**9)
    listed = {"models": models} if models else {}
    plan = make_plan(MergeConfig.from_dict({"method": method, **listed, **values}), max_shard_size=limit)
    plan.close()
    return plan


def test_the_result_is_like_the_base(workshop: Any) -> None:
    base = workshop.tensors(dtype=torch.bfloat16)
    base[NORM] = base[NORM].float()
    paths = [workshop.save("base", base)]
    paths += [workshop.save(name, {k: t.half() for k, t in base.items()}) for name in "ab"]
    plan = planned("ties", paths[1:], base=paths[0])
    outputs = {job.output.name: (job.output.shape, job.output.dtype) for job in plan.jobs}
    assert outputs == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in base.items()}
    job = next(job for job in plan.jobs if job.output.name == QUERY)
    assert job.inputs.labels == tuple(paths) and job.inputs.base is not None
    assert job.arithmetic == torch.float32
    assert (plan.config_from, plan.tokenizer, plan.config.method) == (paths[0], paths[0], "ties")
    assert plan.model_config["torch_dtype"] == "bfloat16"  # of most elements
    assert [shard.file for shard in plan.shards] == ["model.safetensors"]


def test_another_type_is_that_of_all_floating_point_tensors(workshop: Any) -> None:
    path = workshop.save("a", workshop.tensors() | {"steps": torch.arange(3), "mask": torch.tensor([True])})
    plan = planned("linear", [path], dtype="float16")
    dtypes = {job.output.name: job.output.dtype for job in plan.jobs}
    assert (dtypes.pop("steps"), dtypes.pop("mask")) == (torch.int64, torch.bool)
    assert set(dtypes.values()) == {torch.float16} and plan.model_config["torch_dtype"] == "float16"
    assert {job.output.name for job in plan.jobs if job.method is None} == {"steps", "mask"}


def test_a_base_lends_config_and_types_where_a_method_needs_none(workshop: Any) -> None:
    base, a, _ = workshop.trio()
    lender = workshop.save("lender", workshop.tensors(7, dtype=torch.bfloat16), max_position_embeddings=99)
    plan = planned("linear", [base, a], base=lender)
    assert plan.model_config["max_position_embeddings"] == 99
    assert {job.output.dtype for job in plan.jobs} == {torch.bfloat16}
    assert all(job.inputs.labels == (base, a) and job.inputs.base is None for job in plan.jobs)


def test_a_model_without_config_borrows_that_of_another(workshop: Any) -> None:
    a, b = (workshop.save(name, workshop.tensors()) for name in "ab")
    Path(a, "config.json").unlink()
    assert planned("linear", [a, b]).model_config["model_type"] == "llama"
    Path(b, "config.json").unlink()
    assert planned("linear", [a, b]).model_config == {}


@pytest.mark.parametrize(
    ("method", "values", "passes"),
    [
        ("linear", {}, 1),
        ("task_arithmetic", {}, 1),
        ("ties", {"density": 1.0}, 1),
        ("ties", {"density": 0.5}, 3),  # two histograms and the merge
        ("ties", {"density": {"mlp": 1, "*": 0.5}}, 3),  # where b has 0.5 itself
        ("ties", {"density": 0.5, "dtype": "float64"}, 5),  # four histograms
        ("breadcrumbs", {"density": 0.9}, 3),
        ("dare_ties", {"density": 0.5}, 1),
        ("della", {"density": 0.5}, 1),
        ("slerp", {}, 2),
        ("karcher", {}, 2),
        ("model_stock", {}, 2),
    ],
)
def test_how_much_is_read(workshop: Any, method: str, values: dict[str, Any], passes: int) -> None:
    base, a, b = workshop.trio(torch.bfloat16)
    based = method in ("linear", "slerp", "karcher")
    own = {"model": b, "density": 0.5} if isinstance(values.get("density"), dict) else b
    plan = planned(method, [a, own], **({} if based else {"base": base}), **values)
    count = sum(tensor.numel() for tensor in workshop.tensors().values())
    assert plan.parameters == count and plan.bytes_written == count * (8 if "dtype" in values else 2)
    assert {job.passes for job in plan.jobs} == {passes}
    assert plan.bytes_read == 2 * count * (2 if based else 3) * passes


def test_parameters_of_every_tensor(workshop: Any) -> None:
    base, a, b = workshop.trio()
    models = [{"model": a, "weight": [0.0, 1.0]}, {"model": b, "weight": {"mlp": 2.0, "*": 3.0}}]
    plan = planned("task_arithmetic", models, base=base, **{"lambda": {"norm": 0.5}})
    values = {job.output.name: job.values for job in plan.jobs}
    weights = {name: value.of("weight") for name, value in values.items()}
    assert weights[EMBEDDING] == [0, 3] and weights[HEAD] == [0, 3]
    assert weights[QUERY] == [0.5, 3] and weights["model.layers.2.mlp.up_proj.weight"] == [1, 2]
    assert values[NORM].shared["lambda"] == 0.5 and values[QUERY].shared["lambda"] == 1


def test_what_the_bytes_depend_on_is_in_the_identity(workshop: Any) -> None:
    base, a, b = workshop.trio()

    def identity(*models: str, **values: Any) -> dict[str, Any]:
        return planned("ties", list(models), base=base, **({"density": 0.5} | values)).identity()

    first = identity(a, b)
    assert json.loads(json.dumps(first)) == first == identity(a, b)
    others = [identity(b, a), identity(a, b, density=0.4), identity(a, b, seed=1)]
    (Path(a) / "model.safetensors").touch()
    others.append(identity(a, b))
    config = Path(base, "config.json")
    config.write_text(
        config.read_text().replace('"max_position_embeddings": 64', '"max_position_embeddings": 9')
    )
    others.append(identity(a, b))
    assert first not in others and others[-1] != others[-2]


ONE_LONGER = torch.zeros(8, 9)


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        ({QUERY: ONE_LONGER}, "different_shapes", {"tensor": QUERY}),
        ({QUERY: None}, "missing_tensor", {"tensor": QUERY}),
        ({HEAD: None}, "missing_tensor", {"tensor": HEAD}),  # which is not tied, and not the embedding
        ({"steps": torch.ones(3)}, "different_dtypes", {"tensor": "steps"}),
        ({"steps": torch.arange(3).int()}, "different_dtypes", {"tensor": "steps"}),
    ],
)
def test_tensors_that_do_not_fit(
    workshop: Any, changes: dict[str, Tensor | None], code: str, fields: dict[str, Any]
) -> None:
    tensors = workshop.tensors() | {"steps": torch.arange(3)}
    a = workshop.save("a", tensors)
    b = workshop.save("b", {name: t for name, t in (tensors | changes).items() if t is not None})
    for first in ([a, b], [b, a]) if code == "missing_tensor" else ([a, b],):
        with raises_error(code, model=b, **fields):
            planned("linear", first)
    with raises_error(code, **fields):
        planned("task_arithmetic", [b], base=a)


def test_refused_vocabularies(workshop: Any) -> None:
    tensors = workshop.tensors()
    tensors[EMBEDDING] = torch.cat([tensors[EMBEDDING], tensors[EMBEDDING][:2]])
    with raises_error("different_row_counts", tensor=HEAD):  # which was not enlarged with the embedding
        planned("linear", [workshop.save("odd", tensors)])
    path = workshop.save("a", {"layers.0.w": torch.ones(2)}, model_type="other")
    with raises_error("invalid_value", key="vocab"):
        planned("linear", [path], vocab="union")
    assert planned("linear", [path]).alignment is None


def test_the_base_by_another_name_is_refused(workshop: Any) -> None:
    base, a, _ = workshop.trio()
    with raises_error("repeated_model", model=f"{base}/."):
        planned("ties", [a, f"{base}/."], base=base)


def test_models_are_closed_when_one_cannot_be_read(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, opened = workshop.save("a", workshop.tensors()), []

    def noted(spec: str) -> Any:
        opened.append(open_checkpoint(spec))
        return opened[-1]

    monkeypatch.setattr("rlhf_merge.run.plan.open_checkpoint", noted)
    with raises_error("model_not_found"):
        planned("linear", [a, str(workshop.root / "no model")])
    assert len(opened) == 1 and opened[0].tensors == {}


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
TIES = {"method": "ties", "base": "base", "models": ["a", "b"]}


def names(*layers: int) -> dict[str, Any]:
    return dict.fromkeys([EMBEDDING, *(f"model.layers.{i}.w" for i in layers), NORM])


def found(config: MergeConfig | dict[str, Any], tensors: dict[str, Any], first: str) -> list[SourceNames]:
    config = config if isinstance(config, MergeConfig) else MergeConfig.from_dict(config)
    return list(source_names(config, tensors, first))


def sliced(method: str, *slices: dict[str, tuple[int, int]], **more: Any) -> MergeConfig:
    """Slices, each with the ranges of layers by model."""
    listed = [
        {"sources": [{"model": model, "layers": layers} for model, layers in part.items()]} for part in slices
    ]
    return MergeConfig.from_dict({"method": method, "slices": listed} | more)


def test_sources_of_models() -> None:
    sources = found(TIES, {spec: names(0, 1, 2) for spec in ("base", "a", "b")}, "base")
    depths = {EMBEDDING: 0, "model.layers.0.w": 0, "model.layers.1.w": 0.5, "model.layers.2.w": 1, NORM: 0}
    assert {source.output: source.depth for source in sources} == depths
    name = "model.layers.1.w"
    assert sources[2] == SourceNames(name, 0.5, ("base", name), (("a", name), ("b", name)))


def test_a_base_that_lends_its_config_needs_no_tensors() -> None:
    tensors = {"base": {}, "a": names(0, 1), "b": names(0, 1)}
    sources = found(TIES | {"method": "linear"}, tensors, "base")
    assert {source.base for source in sources} == {None} and len(sources) == 4


@pytest.mark.parametrize("lacking", ["base", "a", "b"])
def test_a_missing_tensor_is_named(lacking: str) -> None:
    tensors = {spec: names(0) if spec == lacking else names(0, 1) for spec in ("base", "a", "b")}
    with raises_error("missing_tensor", tensor="model.layers.1.w", model=lacking):
        found(TIES, tensors, "base")


def test_sources_of_slices() -> None:
    config = sliced("passthrough", {"a": (0, 2)}, {"b": (1, 2)}, {"a": (1, 4)})
    sources = found(config, {"a": names(0, 1, 2, 3), "b": names(0, 1)}, "a")
    assert [(source.output, *source.models[0], source.depth, source.slice_index) for source in sources] == [
        (EMBEDDING, "a", EMBEDDING, 0, 0),
        ("model.layers.0.w", "a", "model.layers.0.w", 0, 0),
        ("model.layers.1.w", "a", "model.layers.1.w", 1, 0),
        ("model.layers.2.w", "b", "model.layers.1.w", 1, 1),  # a slice of one layer is at its end
        ("model.layers.3.w", "a", "model.layers.1.w", 0, 2),
        ("model.layers.4.w", "a", "model.layers.2.w", 0.5, 2),
        ("model.layers.5.w", "a", "model.layers.3.w", 1, 2),
        (NORM, "a", NORM, 0, 2),
    ]


def test_what_lies_outside_of_the_layers_goes_with_the_first_and_the_last_slice() -> None:
    config = sliced("linear", {"a": (0, 1), "b": (1, 2)}, {"b": (0, 1), "c": (1, 2)})
    sources = found(config, {spec: names(0, 1) for spec in "abc"}, "a")
    assert [[spec for spec, _ in source.models] for source in sources] == [["a", "b"]] * 2 + [["b", "c"]] * 2
    assert sources[1].models == (("a", "model.layers.0.w"), ("b", "model.layers.1.w"))
    based = sliced("task_arithmetic", {"a": (0, 1), "base": (1, 2)}, base="base")
    layer = found(based, {spec: names(0, 1) for spec in ("a", "base")}, "base")[1]
    assert (layer.base, layer.models) == (("base", "model.layers.1.w"), (("a", "model.layers.0.w"),))


STACKS = {"encoder.layers.0.w": None, "decoder.layers.0.w": None}


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        ({"a": names(0)}, "missing_layer", {"model": "a", "layer": 1}),
        ({"b": names() | {"model.layers.1.v": None}}, "missing_tensor", {"tensor": "model.layers.1.w"}),
        (
            {"b": {EMBEDDING: None, "model.layers.1.w": None}},
            "missing_tensor",
            {"tensor": NORM, "model": "b"},
        ),
        ({"a": STACKS, "b": STACKS}, "ambiguous_stack", {}),
        ({"a": {f"encoder.stages.{i}.layers.0.w": None for i in range(2)}}, "layers_in_stages", {}),
        ({"a": {f"encoder.layers.{i}.blocks.1.w": None for i in range(2)}}, "layers_in_stages", {}),
    ],
)
def test_slices_refused(changes: dict[str, Any], code: str, fields: dict[str, Any]) -> None:
    tensors = {"a": names(0, 1), "b": names(0, 1)} | changes
    tensors["b"] = tensors["b"] if code != "missing_layer" else names(0)
    with raises_error(code, **fields):
        found(sliced("linear", {"a": (1, 2), "b": (1, 2)}), tensors, "a")


def test_slices_of_one_stack_of_several() -> None:
    """The text is cut, the images' layers go with the first slice at their own depths."""
    images, text = [
        [f"{stack}.layers.{{}}.w".format(i) for i in range(4)] for stack in ("vision_tower", "text")
    ]
    tensors = {"a": dict.fromkeys([*images[:3], *text, "norm.w"])}
    parts = {"a": (0, 2)}, {"a": (3, 4)}
    sources = found(sliced("passthrough", *parts, stack="text"), tensors, "a")
    assert [(source.output, source.models[0][1], source.depth, source.slice_index) for source in sources] == [
        (images[0], images[0], 0, 0),
        (images[1], images[1], 0.5, 0),
        (images[2], images[2], 1, 0),
        (text[0], text[0], 0, 0),
        (text[1], text[1], 1, 0),
        (text[2], text[3], 1, 1),
        ("norm.w", "norm.w", 0, 1),
    ]
    for word, code in (
        (None, "ambiguous_stack"),
        ("layers", "ambiguous_stack"),
        ("vision", "unsupported_stack"),
    ):
        with raises_error(code, model="a"):
            found(sliced("passthrough", *parts, stack=word), tensors, "a")
