"""Comparisons of tiny models on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from raises import raises_error
from rlhf_merge.compare.diff import ModelDifference, diff_models
from rlhf_merge.compare.report import difference_json, render_difference
from rlhf_merge.methods.blocks import OnBytes

UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def shown(difference: ModelDifference, width: int = 80, **options: Any) -> str:
    """What a terminal of some width shows."""
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render_difference(difference, **options))
    return capture.get()


def compared(
    workshop: Any, changes: Mapping[str, Tensor | None], base: dict[str, Tensor], **config: Any
) -> Any:
    """A base and a model with other tensors in places; where it is None, without them."""
    tensors = {name: tensor for name, tensor in {**base, **changes}.items() if tensor is not None}
    return diff_models(workshop.save("base", base), [workshop.save("model", tensors, **config)])


def test_one_change_is_found(workshop: Any) -> None:
    tensors = workshop.tensors()
    found = compared(workshop, {UP: tensors[UP] + 0.5}, tensors)
    (tensor,) = (tensor for tensor in found.tensors if tensor.measures.changed[0])
    assert (tensor.name, tensor.shape, tensor.place.row) == (UP, (12, 8), "1")
    assert tensor.measures.of_model(0)["rms"] == pytest.approx(0.5, rel=1e-6)
    square = sum(float(tensor.double().square().sum()) for tensor in tensors.values())
    # Σ τ² = 96 · ¼
    assert found.total.relative_norm(0) == pytest.approx(math.sqrt(24 / square), rel=1e-5)


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

    def begin(total: int) -> OnBytes:
        totals.append(total)
        return read.append

    alone = diff_models(base, [a, b], density=0.5, threads=1, begin=begin)
    many = diff_models(base, [a, b], density=0.5, threads=4)
    assert difference_json(alone) == difference_json(many)
    assert totals == [sum(read)] == [3 * 3 * 4 * alone.total.elements]


def test_density_trims_every_tensor(workshop: Any) -> None:
    base, a, b = workshop.trio()
    found = diff_models(base, [a, b], density=0.25)
    for tensor in found.tensors:
        assert tensor.measures.shared.diagonal().tolist() == [tensor.measures.elements // 4] * 2
    assert 0 < found.total.any_opposed < diff_models(base, [a, b]).total.any_opposed / 4


def test_integers_are_equal_or_not_and_buffers_are_left_out(workshop: Any) -> None:
    tensors = workshop.tensors() | {"steps": torch.tensor([1, 2, 3]), "flags": torch.tensor([True])}
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    found = compared(workshop, {"steps": torch.tensor([1, 5, 4])} | buffer, tensors)
    assert found.integers == {"steps": (2,), "flags": (0,)} and found.total.changed.tolist() == [0]
    assert "steps of model, in 2 elements" in shown(found)
    assert {tensor.name for tensor in found.tensors} == set(tensors) - {"steps", "flags"}


def test_the_first_rows_of_vocabularies_are_compared(workshop: Any) -> None:
    tensors = workshop.tensors()
    grown = {name: torch.cat([tensors[name], torch.ones(2, 8)]) for name in (EMBEDDING, HEAD)}
    base, model = workshop.save("base", tensors), workshop.save("model", tensors | grown, vocab_size=18)
    for found in (diff_models(base, [model]), diff_models(model, [base])):
        assert found.total.changed.tolist() == [0]
        assert {tensor.name: tensor.shape for tensor in found.tensors}[EMBEDDING] == (16, 8)
        (note,) = found.notes
        assert all(part in note for part in (f"16 in {base}", f"18 in {model}", "the first 16 are compared"))


def test_a_tied_head_is_compared_through_the_embedding(workshop: Any) -> None:
    tensors = workshop.tensors()
    found = compared(workshop, {HEAD: None}, tensors, tie_word_embeddings=True)
    (head,) = (tensor for tensor in found.tensors if tensor.name == HEAD)
    difference = float((tensors[EMBEDDING] - tensors[HEAD]).double().norm())
    assert math.sqrt(head.measures.products[0, 0]) == pytest.approx(difference, rel=1e-5)
    (note,) = found.notes
    assert f"has no {HEAD}: its embedding, which is its head, is compared in its place" in note


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (None, "missing_tensor"),
        (torch.ones(8, 12), "different_shapes"),
        (torch.ones(12, 8).long(), "different_dtypes"),
        (torch.full((12, 8), math.nan), "non_finite_value"),
    ],
)
def test_refused_tensors(workshop: Any, other: Tensor | None, code: str) -> None:
    with raises_error(code, tensor=UP):
        compared(workshop, {UP: other}, workshop.tensors())


@pytest.mark.parametrize(
    ("others", "density", "code"),
    [
        *(("ab", density, "invalid_value") for density in (0.0, -0.5, 1.5, math.nan)),
        ("a", 0.5, "invalid_value"),
        ("", None, "too_few_models"),
    ],
)
def test_densities_out_of_range_and_too_few_models(others: str, density: float | None, code: str) -> None:
    with raises_error(code):
        diff_models("base", list(others), density=density)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_table_by_layer_fits(workshop: Any, count: int) -> None:
    tensors = workshop.tensors()
    base = workshop.save("base", tensors)
    models = [
        workshop.save(f"a-model-with-a-long-name-{i}", workshop.tuned(tensors, i)) for i in range(count)
    ]
    text = shown(diff_models(base, models))
    rows = [line.split()[0] for line in text.splitlines()[3:11] if line.strip()]
    assert rows == ["embedding", "0", "1", "2", "norm", "head", "all"]
    assert max(map(len, text.splitlines())) <= 80


def test_the_table_names_the_kind_that_changed_most(workshop: Any) -> None:
    """Where the base is zero, the change is beyond measure, and not the most."""
    tensors = {name: torch.ones_like(tensor) for name, tensor in workshop.tensors().items()}
    bias = "model.layers.1.gate.bias"
    found = compared(
        workshop, {UP: tensors[UP] + 0.25, bias: torch.ones(3)}, tensors | {bias: torch.zeros(3)}
    )
    rows = {line.split()[0]: line.split() for line in shown(found).splitlines() if line.strip()}
    assert rows["1"][-2:] == ["mlp.up", "25%"] and rows["0"] == ["0", "0%", "0", "0%", "100%"]
    assert "∞" in shown(found, by="kind")


def test_tables_by_kind_and_by_tensor(workshop: Any) -> None:
    base, a, b = workshop.trio()
    found = diff_models(base, [a, b])
    assert "mlp.down" in shown(found, by="kind") and UP in shown(found, width=120, by="tensor")
    with raises_error("invalid_value", key="by"):
        render_difference(found, by="model")


def test_json_holds_no_nan(workshop: Any) -> None:
    tensors = workshop.tensors() | {"bias": torch.zeros(2), "steps": torch.tensor([3])}
    base = workshop.save("base", tensors)
    a, b = (workshop.save(name, tensors | {"bias": torch.ones(2)}) for name in "ab")
    plain = difference_json(diff_models(base, [a, b], density=0.5))
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert (plain["names"], plain["density"]) == (["a", "b"], 0.5)
    bias = plain["tensors"]["bias"]["models"]["a"]
    assert (bias["relative_norm"], bias["changed"]) == (None, 1)
    assert plain["layers"]["0"]["pairs"] == [
        {"models": ["a", "b"], "cosine": None, "sign_conflict": 0, "sign_conflict_of_shared": None}
    ]
    assert plain["kinds"]["mlp.up"]["elements"] == 3 * 96
    assert plain["unequal_integers"] == {"steps": {"a": 0, "b": 0}}


def test_an_adapter_is_a_model(workshop: Any) -> None:
    base, key = workshop.save("base", workshop.tensors()), UP.removesuffix(".weight")
    update = {f"{key}.lora_A.weight": torch.ones(1, 8), f"{key}.lora_B.weight": 0.5 * torch.ones(12, 1)}
    found = diff_models(base, [f"{base}+{workshop.adapter('adapter', update, r=1, lora_alpha=1)}"])
    assert found.names == ("base+adapter",)
    assert found.cells["1", "mlp.up"].of_model(0)["rms"] == pytest.approx(0.5, rel=1e-5)


def test_names_in_brackets_are_no_markup(workshop: Any) -> None:
    base = workshop.save("base", {"x[a]": torch.ones(2)})
    models = [workshop.save(name, {"x[a]": torch.ones(2)}) for name in ("m[a]", "m[b]", "m[c]")]
    text = shown(diff_models(base, models), by="tensor")
    assert "x[a]" in text and "m[a], m[c]" in text
    assert text.splitlines()[1].split()[1:4] == ["m[a]", "m[b]", "m[c]"]
