"""Comparisons of tiny models on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from raises import raises_error
from rlhf_merge.compare.diff import ModelDifference, diff_models
from rlhf_merge.compare.diff_text import difference_json, render_difference
from rlhf_merge.errors import MergeError

UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def shown(difference: ModelDifference, width: int = 80, **options: Any) -> str:
    """What a terminal of some width shows."""
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render_difference(difference, **options))
    return capture.get()


def changed(tensors: dict[str, Tensor], **changes: Tensor) -> dict[str, Tensor]:
    """Some tensors, one of which has something added, by the end of its name with _ for the dots."""
    result = dict(tensors)
    for ending, change in changes.items():
        (name,) = (name for name in tensors if name.replace(".", "_").endswith(ending))
        result[name] = tensors[name] + change
    return result


def test_one_change_is_found(workshop: Any) -> None:
    tensors = workshop.tensors()
    base = workshop.save("base", tensors)
    model = workshop.save("model", changed(tensors, layers_1_mlp_up_proj_weight=torch.tensor(0.5)))
    found = diff_models(base, [model])
    (tensor,) = (tensor for tensor in found.tensors if tensor.measures.changed[0])
    assert (tensor.name, tensor.shape, tensor.place.row) == (UP, (12, 8), "1")
    assert tensor.measures.rms(0) == pytest.approx(0.5, rel=1e-6)
    # Σ τ² = 96 · ¼
    assert found.total.relative_norm(0) == pytest.approx(
        math.sqrt(24) / math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values())),
        rel=1e-5,
    )


def test_sums_by_layer_by_kind_and_in_cells_cover_all_elements(workshop: Any) -> None:
    base, a, b = workshop.trio()
    found = diff_models(base, [a, b])
    total = sum(tensor.measures.elements for tensor in found.tensors)
    assert list(found.by_row) == ["embedding", "0", "1", "2", "norm", "head"]
    assert list(found.by_kind) == [
        *("embedding", "attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down", "norm"),
        *("norm outside", "head"),
    ]
    for groups in (found.by_row, found.by_kind, found.cells):
        assert sum(measures.elements for measures in groups.values()) == total == found.total.elements
        assert sum(measures.any_opposed for measures in groups.values()) == found.total.any_opposed
    assert found.cells["2", "norm"].elements == 16


def test_threads_change_nothing_and_all_bytes_are_reported(workshop: Any) -> None:
    base, a, b = workshop.trio()
    read: list[int] = []
    totals: list[int] = []
    alone = diff_models(base, [a, b], density=0.5, threads=1, on_total=totals.append, on_bytes=read.append)
    many = diff_models(base, [a, b], density=0.5, threads=4)
    assert difference_json(alone) == difference_json(many)
    assert totals == [sum(read)] == [3 * 3 * 4 * alone.total.elements]


def test_density_trims_every_tensor(workshop: Any) -> None:
    base, a, b = workshop.trio()
    found = diff_models(base, [a, b], density=0.25)
    for tensor in found.tensors:
        assert tensor.measures.shared.diagonal().tolist() == [tensor.measures.elements // 4] * 2
    assert found.total.any_conflict is not None
    assert found.total.any_conflict < (diff_models(base, [a, b]).total.any_conflict or 0) / 4


def test_types_may_differ(workshop: Any) -> None:
    tensors = workshop.tensors()
    base = workshop.save("base", tensors)
    model = workshop.save("model", {name: tensor.bfloat16() for name, tensor in tensors.items()})
    found = diff_models(base, [model])
    assert found.total.share_same_in_bf16(0) == 1
    assert 0 < found.total.relative_norm(0) < 2**-8


def test_integers_are_equal_or_not(workshop: Any) -> None:
    tensors = workshop.tensors() | {"steps": torch.tensor([1, 2, 3]), "flags": torch.tensor([True])}
    base = workshop.save("base", tensors)
    model = workshop.save("model", tensors | {"steps": torch.tensor([1, 5, 4])})
    found = diff_models(base, [model, base])
    assert found.integers == {"steps": (2, 0), "flags": (0, 0)}
    assert "steps of model, in 2 elements" in shown(found)
    assert "steps" not in {tensor.name for tensor in found.tensors}


def test_the_first_rows_of_vocabularies_are_compared(workshop: Any) -> None:
    tensors = workshop.tensors()
    grown = {name: torch.cat([tensors[name], torch.ones(2, 8)]) for name in (EMBEDDING, HEAD)}
    base = workshop.save("base", tensors)
    model = workshop.save("model", tensors | grown, vocab_size=18)
    for found in (diff_models(base, [model]), diff_models(model, [base])):
        assert found.total.changed.tolist() == [0]
        assert {tensor.name: tensor.shape for tensor in found.tensors}[EMBEDDING] == (16, 8)
        (note,) = found.notes
        assert f"16 in {base}" in note
        assert f"18 in {model}" in note
        assert "the first 16 are compared" in note


def test_a_tied_head_is_compared_through_the_embedding(workshop: Any) -> None:
    tensors = workshop.tensors()
    base = workshop.save("base", tensors)
    tied = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    model = workshop.save("model", tied, tie_word_embeddings=True)
    found = diff_models(base, [model])
    (head,) = (tensor for tensor in found.tensors if tensor.name == HEAD)
    difference = (tensors[EMBEDDING] - tensors[HEAD]).double().norm()
    assert math.sqrt(head.measures.products[0, 0]) == pytest.approx(float(difference), rel=1e-5)
    assert found.notes == (
        f"{model} has no lm_head.weight: its embedding, which is its head, is compared in its place",
    )


def test_buffers_are_left_out(workshop: Any) -> None:
    tensors = workshop.tensors()
    base = workshop.save("base", tensors)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    found = diff_models(base, [workshop.save("model", tensors | buffer)])
    assert len(found.tensors) == len(tensors)
    assert found.total.changed.tolist() == [0]


def test_a_missing_tensor_is_refused(workshop: Any) -> None:
    tensors = workshop.tensors()
    base = workshop.save("base", tensors)
    model = workshop.save("model", {name: tensor for name, tensor in tensors.items() if name != UP})
    for first, second in ((base, model), (model, base)):
        with raises_error("missing_tensor", model=model):
            diff_models(first, [second])


@pytest.mark.parametrize(
    ("other", "code"),
    [(torch.ones(8, 12), "different_shapes"), (torch.ones(12, 8, dtype=torch.int64), "different_dtypes")],
)
def test_another_shape_or_kind_of_number_is_refused(workshop: Any, other: Tensor, code: str) -> None:
    tensors = workshop.tensors()
    base, model = workshop.save("base", tensors), workshop.save("model", tensors | {UP: other})
    with raises_error(code, tensor=UP):
        diff_models(base, [model])


def test_nan_is_refused_by_name(workshop: Any) -> None:
    tensors = workshop.tensors()
    base = workshop.save("base", tensors)
    model = workshop.save("model", changed(tensors, layers_1_mlp_up_proj_weight=torch.tensor(math.nan)))
    with raises_error("non_finite_value", tensor="model.layers.1.mlp.up_proj.weight"):
        diff_models(base, [model])


@pytest.mark.parametrize(
    ("others", "density"), [("ab", 0.0), ("ab", -0.5), ("ab", 1.5), ("ab", math.nan), ("a", 0.5), ("", None)]
)
def test_densities_out_of_range_and_too_few_models_are_refused(others: str, density: float | None) -> None:
    with pytest.raises(MergeError):
        diff_models("base", list(others), density=density)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_table_by_layer_fits(workshop: Any, count: int) -> None:
    tensors = workshop.tensors()
    base = workshop.save("base", tensors)
    models = [
        workshop.save(f"a-model-with-a-long-name-{i}", workshop.tuned(tensors, i))
        for i in range(1, count + 1)
    ]
    text = shown(diff_models(base, models))
    rows = [line.split()[0] for line in text.splitlines()[3:11] if line.strip()]
    assert rows == ["embedding", "0", "1", "2", "norm", "head", "all"]
    assert max(map(len, text.splitlines())) <= 80


def test_the_table_names_the_kind_that_changed_most(workshop: Any) -> None:
    tensors = {name: torch.ones_like(tensor) for name, tensor in workshop.tensors().items()}
    base = workshop.save("base", tensors)
    model = workshop.save("model", changed(tensors, layers_1_mlp_up_proj_weight=torch.tensor(0.25)))
    lines = shown(diff_models(base, [model])).splitlines()
    (row,) = (line for line in lines if line.startswith("1 "))
    assert row.split()[-2:] == ["mlp.up", "25%"]
    assert next(line for line in lines if line.startswith("0 ")).split() == ["0", "0%", "0", "0%", "100%"]


def test_tables_by_kind_and_by_tensor(workshop: Any) -> None:
    base, a, b = workshop.trio()
    found = diff_models(base, [a, b])
    assert "mlp.down" in shown(found, by="kind")
    assert UP in shown(found, width=120, by="tensor")
    with raises_error("invalid_value", key="by"):
        render_difference(found, by="model")


def test_json_holds_no_nan(workshop: Any) -> None:
    tensors = workshop.tensors() | {"bias": torch.zeros(2), "steps": torch.tensor([3])}
    base = workshop.save("base", tensors)
    a, b = (workshop.save(name, tensors | {"bias": torch.ones(2)}) for name in "ab")
    plain = difference_json(diff_models(base, [a, b], density=0.5))
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert (plain["names"], plain["density"]) == (["a", "b"], 0.5)
    assert plain["tensors"]["bias"]["models"]["a"]["relative_norm"] is None
    assert plain["tensors"]["bias"]["models"]["a"]["changed"] == 1
    assert plain["layers"]["0"]["pairs"] == [
        {"models": ["a", "b"], "cosine": None, "sign_conflict": 0, "sign_conflict_of_shared": None}
    ]
    assert plain["kinds"]["mlp.up"]["elements"] == 3 * 96
    assert plain["unequal_integers"] == {"steps": {"a": 0, "b": 0}}


def test_an_adapter_is_a_model(workshop: Any) -> None:
    from safetensors.torch import save_file

    base = workshop.save("base", workshop.tensors())
    adapter = Path(workshop.root) / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    prefix = "base_model.model.model.layers.1.mlp.up_proj.lora_"
    update = {f"{prefix}A.weight": torch.ones(1, 8), f"{prefix}B.weight": 0.5 * torch.ones(12, 1)}
    save_file(update, adapter / "adapter_model.safetensors")
    found = diff_models(base, [f"{base}+{adapter}"])
    assert found.names == ("base+adapter",)
    assert found.cells["1", "mlp.up"].rms(0) == pytest.approx(0.5, rel=1e-5)


def test_changes_of_a_base_of_zeros_are_not_the_largest(workshop: Any) -> None:
    tensors = workshop.tensors() | {"model.layers.1.gate.bias": torch.zeros(3)}
    base = workshop.save("base", tensors)
    model = changed(
        tensors, layers_1_mlp_up_proj_weight=torch.tensor(0.5), layers_1_gate_bias=torch.tensor(1.0)
    )
    found = diff_models(base, [workshop.save("model", model)])
    (row,) = (line for line in shown(found).splitlines() if line.startswith("1 "))
    assert row.split()[-2] == "mlp.up"
    assert "∞" in shown(found, by="kind")


def test_names_in_brackets_are_no_markup(workshop: Any) -> None:
    tensors = {"x[a]": torch.ones(2)}
    base = workshop.save("base", tensors)
    models = [workshop.save(name, tensors) for name in ("m[a]", "m[b]", "m[c]")]
    text = shown(diff_models(base, models), by="tensor")
    assert "x[a]" in text
    assert "m[a], m[c]" in text
    assert text.splitlines()[1].split()[1:4] == ["m[a]", "m[b]", "m[c]"]
