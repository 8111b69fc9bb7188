"""Measures of task vectors: by hand, and against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raises import raises_error
from rlhf_merge.compare.diff import Measures, measure, passes
from rlhf_merge.methods import blocks
from rlhf_merge.methods.blocks import Inputs, MemoryTensor, Workspace


def measured(base: Tensor, *models: Tensor, density: float | None = None) -> Measures:
    """The measures of tensors in memory."""
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    inputs = Inputs("x", MemoryTensor(base), tuple(map(MemoryTensor, models)))
    return measure(inputs, Workspace(dtype), density)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_one_model_by_hand() -> None:
    # τ = (0, 3, 0, 4), ‖τ‖ = 5, and ‖θ₀‖ = √(36 + 64) = 10
    found = measured(torch.tensor([[6.0, 0.0], [8.0, 0.0]]), torch.tensor([[6.0, 3.0], [8.0, 4.0]]))
    assert found.relative_norm(0) == 0.5
    assert found.of_model(0)["rms"] == 2.5
    assert found.of_model(0)["changed"] == 0.5
    assert tuple(found.of_any().values()) == (0, None)


def test_two_models_by_hand() -> None:
    # τ₁ = (1, -2, 0, 2), τ₂ = (1, 2, 1, 0): τ₁τ₂ = 1 - 4 = -3, norms 3 and √6; both have a sign in the first
    # two elements, opposite ones in the second
    base = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = measured(base, base + torch.tensor([1.0, -2, 0, 2]), base + torch.tensor([1.0, 2, 1, 0]))
    assert found.of_pair(0, 1)["cosine"] == pytest.approx(-3 / math.sqrt(54), rel=1e-6)
    assert found.of_pair(0, 1)["sign_conflict"] == found.of_any()["sign_conflict"] == 0.25
    assert found.of_pair(0, 1)["sign_conflict_of_shared"] == found.of_any()["sign_conflict_of_shared"] == 0.5
    assert found.shared.tolist() == [[3, 2], [2, 3]]


def test_any_conflict_of_three_models() -> None:
    # the columns: + + -, + - -, + 0 -, + 0 0, + + +; three of five have opposite signs, one only one sign
    base = torch.zeros(5)
    models = [torch.tensor(row) for row in ([1.0, 1, 1, 1, 1], [1.0, -1, 0, 0, 1], [-1.0, -1, -1, 0, 1])]
    found = measured(base, *models)
    assert found.of_any()["sign_conflict"] == 3 / 5
    assert found.of_any()["sign_conflict_of_shared"] == 3 / 4
    assert found.opposed.tolist() == [[0, 1, 3], [1, 0, 1], [3, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_add_up_to_plain_formulas(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 7)
    base = normal(9, 11).to(dtype)
    models = [
        (base + 0.1 * (normal(9, 11, seed=seed) + normal(9, 11, seed=9))).to(dtype) for seed in (1, 2, 3)
    ]
    models[0][2:4] = base[2:4]
    found = measured(base, *models)
    taus = torch.stack([(model - base).flatten() for model in models]).double()
    np.testing.assert_allclose(found.products, (taus @ taus.T).numpy(), rtol=1e-5)
    assert found.elements == 99
    assert found.base_square == pytest.approx(float(base.double().square().sum()), rel=1e-6)
    assert found.changed.tolist() == [77, 99, 99]
    signs = taus.sign()
    opposed = (signs[:, None] * signs[None] < 0).sum(-1)
    shared = (signs[:, None] * signs[None] != 0).sum(-1)
    assert found.opposed.tolist() == opposed.tolist()
    assert found.shared.tolist() == shared.tolist()
    assert found.any_opposed == int(((signs > 0).any(0) & (signs < 0).any(0)).sum())
    assert found.any_shared == 99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trimming_keeps_the_largest_magnitudes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 7)
    base = normal(50).to(dtype)
    models = [(base + normal(50, seed=seed)).to(dtype) for seed in (1, 2)]
    found = measured(base, *models, density=0.3)
    kept = []
    for model in models:
        tau = (model - base).double()
        kept.append(torch.where(tau.abs() >= tau.abs().sort(descending=True).values[14], tau, 0))
    assert found.shared.diagonal().tolist() == [15, 15]
    assert found.shared[0, 1] == int((kept[0] * kept[1] != 0).sum())
    assert found.opposed[0, 1] == found.any_opposed == int((kept[0] * kept[1] < 0).sum())
    untrimmed = measured(base, *models)
    np.testing.assert_array_equal(found.products, untrimmed.products)
    np.testing.assert_array_equal(found.changed, untrimmed.changed)


def test_zeros_have_no_sign_even_where_trimming_keeps_them() -> None:
    base = torch.zeros(10)
    one = base.clone()
    one[0] = 1
    found = measured(base, one, -one, density=0.5)
    assert (found.shared[0, 0], found.any_opposed) == (1, 1)


def test_the_smallest_numbers_have_a_sign() -> None:
    tiny = torch.tensor([2.0**-149, -(2.0**-149)])
    found = measured(torch.zeros(2), tiny, -tiny)
    assert (found.shared[0, 0], found.any_opposed) == (2, 2)


def test_what_bfloat16_cannot_tell_apart() -> None:
    # bfloat16 has 8 bits: 1 + 2^-7 is its next number after 1, and 1 + 2^-10 is rounded to 1
    base = torch.ones(4)
    model = base + torch.tensor([0, 2.0**-10, 2.0**-10, 2.0**-7])
    found = measured(base, model)
    assert found.of_model(0)["same_in_bf16"] == 0.75
    found = measured(base.bfloat16(), model.bfloat16())
    assert (found.of_model(0)["same_in_bf16"], found.of_model(0)["changed"]) == (0.75, 0.25)


def test_where_there_is_nothing_to_divide_by() -> None:
    """Equal models, a base of zeros, no elements."""
    base, zero, none = normal(5), torch.zeros(3), torch.empty(0)
    equal, from_zero, empty = measured(base, base, base), measured(zero, zero, zero + 1), measured(none, none)
    assert (equal.of_pair(0, 1)["cosine"], equal.relative_norm(0)) == (None, 0)
    assert tuple(equal.of_any().values()) == (0, None)
    assert (from_zero.relative_norm(0), from_zero.relative_norm(1)) == (0, math.inf)
    assert empty.of_model(0) == {"relative_norm": 0, "rms": None, "changed": None, "same_in_bf16": None}


def test_cosines_stay_in_range_and_large_numbers_do_not_overflow() -> None:
    base = torch.zeros(3)
    model = torch.tensor([1e30, 2e30, 3e30])
    found = measured(base, model, 2 * model, -model)
    assert found.of_pair(0, 1)["cosine"] == pytest.approx(1, abs=1e-9)
    assert found.of_pair(0, 2)["cosine"] == pytest.approx(-1, abs=1e-9)
    assert max(abs(found.of_pair(i, j)["cosine"] or 0) for i in range(3) for j in range(3)) <= 1


def test_tensors_add_up() -> None:
    parts: list[Any] = [(normal(4), normal(4, seed=1), normal(4, seed=2)) for _ in range(2)]
    together = measured(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    added = Measures.total((measured(*part) for part in parts), 2)
    assert added.elements == together.elements
    assert added.base_square == pytest.approx(together.base_square, rel=1e-6)
    assert added.of_pair(0, 1)["cosine"] == pytest.approx(together.of_pair(0, 1)["cosine"], rel=1e-5)
    assert added.opposed.tolist() == together.opposed.tolist()


def test_nan_is_refused_by_name() -> None:
    inputs = Inputs(
        "x", MemoryTensor(torch.ones(2)), (MemoryTensor(torch.tensor([1, math.nan])),), ("a", "b")
    )
    with raises_error("non_finite_value", model="b", tensor="x"):
        measure(inputs, Workspace())


def test_passes() -> None:
    assert [passes(torch.float32, density) for density in (None, 1, 0.2)] == [1, 1, 3]
    assert passes(torch.float64, 0.2) == 5
