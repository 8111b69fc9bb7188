"""What is decided before a merge begins: inputs, types, sizes, and what does not fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import open_checkpoint
from rlhf_merge.run.plan import COPY, MergePlan, make_plan

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def planned(method: str, models: list[Any], **values: Any) -> MergePlan:
    plan = make_plan(MergeConfig.from_dict({"method": method, "models": models, **values}))
    plan.close()
    return plan


def refusal(method: str, models: list[Any], **values: Any) -> str:
    with pytest.raises(MergeError) as caught:
        planned(method, models, **values)
    return str(caught.value)


def test_the_result_is_like_the_base(workshop: Any):
    base = workshop.tensors(dtype=torch.bfloat16)
    base[NORM] = base[NORM].float()
    paths = [workshop.save("base", base)]
    paths += [workshop.save(name, {k: t.half() for k, t in base.items()}) for name in "ab"]
    plan = planned("ties", paths[1:], base=paths[0])
    outputs = {job.output.name: job.output for job in plan.jobs}
    assert {name: (out.shape, out.dtype) for name, out in outputs.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in base.items()
    }
    job = next(job for job in plan.jobs if job.output.name == QUERY)
    assert job.inputs.labels == tuple(paths) and job.inputs.base is not None
    assert job.output.dtype == torch.bfloat16 and job.arithmetic == torch.float32
    assert (plan.reference, plan.tokenizer, plan.config.method) == (paths[0], paths[0], "ties")
    assert plan.model_config["torch_dtype"] == "bfloat16"  # of most elements
    assert [shard.file for shard in plan.shards] == ["model.safetensors"]


def test_another_type_is_that_of_all_floating_point_tensors(workshop: Any):
    tensors = workshop.tensors() | {"steps": torch.arange(3)}
    path = workshop.save("a", tensors)
    plan = planned("linear", [path], dtype="float16")
    dtypes = {job.output.name: job.output.dtype for job in plan.jobs}
    assert dtypes.pop("steps") == torch.int64 and set(dtypes.values()) == {torch.float16}
    assert plan.model_config["torch_dtype"] == "float16"


def test_a_base_lends_config_and_types_where_a_method_needs_none(workshop: Any):
    base, a, _ = workshop.trio()
    lender = workshop.save("lender", workshop.tensors(7, dtype=torch.bfloat16), max_position_embeddings=99)
    plan = planned("linear", [base, a], base=lender)
    assert plan.model_config["max_position_embeddings"] == 99
    assert {job.output.dtype for job in plan.jobs} == {torch.bfloat16}
    assert all(job.inputs.labels == (base, a) and job.inputs.base is None for job in plan.jobs)


@pytest.mark.parametrize(
    ("method", "values", "passes"),
    [
        ("linear", {}, 1),
        ("task_arithmetic", {}, 1),
        ("ties", {"density": 1.0}, 1),
        ("ties", {"density": 0.5}, 3),  # two histograms and the merge
        ("breadcrumbs", {"density": 0.9}, 3),
        ("dare_ties", {"density": 0.5}, 1),
        ("della", {"density": 0.5}, 1),
        ("slerp", {}, 2),
        ("karcher", {}, 2),
        ("model_stock", {}, 2),
    ],
)
def test_how_much_is_read(workshop: Any, method: str, values: dict[str, Any], passes: int):
    base, a, b = workshop.trio(torch.bfloat16)
    based = method in ("linear", "slerp", "karcher")
    plan = planned(method, [a, b], **({} if based else {"base": base}), **values)
    count = sum(tensor.numel() for tensor in workshop.tensors().values())
    assert plan.parameters == count and plan.bytes_written == 2 * count
    assert {job.passes for job in plan.jobs} == {passes}
    assert plan.bytes_read == 2 * count * (2 if based else 3) * passes


def test_float64_is_read_more_often(workshop: Any):
    base, a, b = workshop.trio()
    plan = planned("ties", [a, b], base=base, dtype="float64", density=0.5)
    assert {job.passes for job in plan.jobs} == {5}  # four histograms and the merge
    alone = planned("ties", [a, {"model": b, "density": 0.5}], base=base, density={"mlp": 1, "*": 0.5})
    assert {job.passes for job in alone.jobs} == {3}


def test_parameters_of_every_tensor(workshop: Any):
    base, a, b = workshop.trio()
    models = [{"model": a, "weight": [0.0, 1.0]}, {"model": b, "weight": {"mlp": 2.0, "*": 3.0}}]
    plan = planned("task_arithmetic", models, base=base, **{"lambda": {"norm": 0.5}})
    values = {job.output.name: job.values for job in plan.jobs}
    weights = {name: [own["weight"] for own in value.per_model] for name, value in values.items()}
    assert weights[EMBEDDING] == [0, 3] and weights[HEAD] == [0, 3]
    assert weights[QUERY] == [0.5, 3] and weights["model.layers.2.mlp.up_proj.weight"] == [1, 2]
    assert values[NORM].shared["lambda"] == 0.5 and values[QUERY].shared["lambda"] == 1


def test_shards_are_filled_in_order(workshop: Any):
    path = workshop.save("a", workshop.tensors())
    config = MergeConfig.from_dict({"method": "linear", "models": [path]})
    with_limit = make_plan(config, max_shard_size=2000)
    with_limit.close()
    assert len(with_limit.shards) > 3
    assert {name for shard in with_limit.shards for name in shard.places} == set(workshop.tensors())
    assert with_limit.shards[0].file == f"model-00001-of-{len(with_limit.shards):05d}.safetensors"


def test_identity(workshop: Any):
    base, a, b = workshop.trio()
    first = planned("ties", [a, b], base=base, density=0.5).identity()
    assert json.loads(json.dumps(first)) == first
    assert first == planned("ties", [a, b], base=base, density=0.5).identity()
    assert first != planned("ties", [a, b], base=base, density=0.4).identity()
    assert first != planned("ties", [b, a], base=base, density=0.5).identity()
    assert first != planned("ties", [a, b], base=base, density=0.5, seed=1).identity()
    file = Path(a) / "model.safetensors"
    file.touch()
    assert first != planned("ties", [a, b], base=base, density=0.5).identity()


def test_integers_are_copied(workshop: Any):
    tensors = workshop.tensors() | {"steps": torch.arange(3), "mask": torch.tensor([True, False])}
    paths = [workshop.save(name, tensors) for name in ("base", "a")]
    plan = planned("ties", paths[1:], base=paths[0])
    methods = {job.output.name: job.method for job in plan.jobs}
    assert methods.pop("steps") == methods.pop("mask") == COPY
    assert set(methods.values()) == {"ties"}


def changed(tensors: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    """With other tensors, by the end of their names."""
    result = dict(tensors)
    for ending, tensor in changes.items():
        name = next(name for name in result if name.endswith(ending))
        result.pop(name)
        result |= {} if tensor is None else {name: tensor}
    return result


def test_another_shape_is_refused(workshop: Any):
    tensors = workshop.tensors()
    a = workshop.save("a", tensors)
    b = workshop.save("b", changed(tensors, **{"1.self_attn.q_proj.weight": torch.zeros(8, 9)}))
    assert refusal("linear", [a, b]).startswith(
        f"tensor {QUERY} has shape [8, 9] in {b} but [8, 8] in {a}; only models of one architecture"
    )


def test_a_missing_tensor_is_refused_whichever_model_lacks_it(workshop: Any):
    tensors = workshop.tensors()
    a = workshop.save("a", tensors)
    b = workshop.save("b", changed(tensors, **{"1.self_attn.q_proj.weight": None}))
    assert refusal("linear", [a, b]).startswith(f"{b} lacks tensor {QUERY}, which {a} has")
    assert refusal("linear", [b, a]).startswith(f"{b} lacks tensor {QUERY}, which {a} has")
    assert refusal("task_arithmetic", [b], base=a).startswith(f"{b} lacks tensor {QUERY}, which {a} has")


def test_integers_against_numbers_are_refused(workshop: Any):
    a = workshop.save("a", workshop.tensors() | {"steps": torch.arange(3)})
    b = workshop.save("b", workshop.tensors() | {"steps": torch.ones(3)})
    assert f"tensor steps is torch.float32 in {b} but torch.int64 in {a}" in refusal("linear", [a, b])
    c = workshop.save("c", workshop.tensors() | {"steps": torch.arange(3).int()})
    assert f"tensor steps is torch.int32 in {c} but torch.int64 in {a}" in refusal("linear", [a, c])


@pytest.mark.parametrize(
    ("key", "value"), [("model_type", "qwen2"), ("num_attention_heads", 4), ("rope_theta", 5e5)]
)
def test_another_architecture_is_refused(workshop: Any, key: str, value: Any):
    a = workshop.save("a", workshop.tensors(), rope_theta=1e4)
    b = workshop.save("b", workshop.tensors(), **{"rope_theta": 1e4, key: value})
    message = refusal("linear", [a, b])
    assert message.startswith(f"config.json says {key} ") and f"but {value!r} in {b}" in message


def test_another_number_of_layers_needs_slices(workshop: Any):
    a = workshop.save("a", workshop.tensors())
    b = workshop.save("b", workshop.tensors(layers=2), num_hidden_layers=2)
    assert "num_hidden_layers 3 in" in refusal("linear", [a, b])
    assert "to merge ranges of layers, give slices" in refusal("linear", [a, b])
    parts = [{"sources": [{"model": path, "layers": [0, 2]}]} for path in (a, b)]
    plan = make_plan(MergeConfig.from_dict({"method": "passthrough", "slices": parts}))
    plan.close()
    assert plan.model_config["num_hidden_layers"] == 4


@pytest.mark.parametrize(
    ("tied", "heads", "expected", "config"),
    [
        ((True, True), (False, False), False, True),
        ((True, True), (True, False), False, True),  # saved a second time
        ((False, False), (True, True), True, False),
        ((False, True), (True, False), True, False),
        ((True, False), (False, True), True, False),
    ],
)
def test_tied_heads(
    workshop: Any, tied: tuple[bool, bool], heads: tuple[bool, bool], expected: bool, config: bool
):
    paths = [
        workshop.save(name, workshop.tensors(tied=not head), tie_word_embeddings=own)
        for name, own, head in zip("ab", tied, heads, strict=True)
    ]
    plan = planned("linear", paths)
    assert (HEAD in [job.output.name for job in plan.jobs]) is expected
    assert plan.model_config["tie_word_embeddings"] is config


def test_vocabularies_of_other_lengths_need_a_word(workshop: Any):
    tensors = workshop.tensors()
    a = workshop.save("a", tensors)
    longer = {k: torch.cat([t, t[:2]]) if k in (EMBEDDING, HEAD) else t for k, t in tensors.items()}
    b = workshop.save("b", longer, vocab_size=18)
    assert "--vocab" in refusal("linear", [a, b]) and EMBEDDING in refusal("linear", [a, b])
    plan = planned("linear", [b, a], vocab="truncate")
    shapes = {job.output.name: job.output.shape for job in plan.jobs}
    assert shapes[EMBEDDING] == shapes[HEAD] == (16, 8) and plan.model_config["vocab_size"] == 16
    assert plan.tokenizer == a


def test_a_head_that_was_not_enlarged_with_the_embedding_is_refused(workshop: Any):
    tensors = workshop.tensors()
    tensors[EMBEDDING] = torch.cat([tensors[EMBEDDING], tensors[EMBEDDING][:2]])
    message = f"tensor {HEAD} would have 16 rows and the embedding 18"
    assert refusal("linear", [workshop.save("a", tensors)]).startswith(message)


def test_vocab_of_a_model_without_one_is_refused(workshop: Any):
    path = workshop.save("a", {"layers.0.w": torch.ones(2)}, model_type="other")
    message = f"vocab is union, but {path} has no embedding of tokens; leave it out"
    assert refusal("linear", [path], vocab="union") == message
    assert planned("linear", [path]).alignment is None


def test_models_are_closed_when_one_cannot_be_read(workshop: Any, monkeypatch: pytest.MonkeyPatch):
    a, opened = workshop.save("a", workshop.tensors()), []

    def noted(spec: str) -> Any:
        opened.append(open_checkpoint(spec))
        return opened[-1]

    monkeypatch.setattr("rlhf_merge.run.plan.open_checkpoint", noted)
    assert "is not a folder here" in refusal("linear", [a, str(workshop.root / "no model")])
    assert len(opened) == 1 and opened[0].tensors == {}
