"""What must hold of the methods on any tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Literal

import pytest
import torch
from torch import Tensor

from proofs import by_default
from rlhf_merge import (
    breadcrumbs,
    dare,
    della,
    linear,
    model_stock,
    nearswap,
    slerp,
    spherical_mean,
    task_arithmetic,
    ties,
)
from rlhf_merge.methods import blocks
from rlhf_merge.methods.families import METHODS

Merge = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Merges a base and three models."""

WEIGHTS = [0.3, 1.1, 0.4]
ELEMENTWISE: dict[str, Merge] = {
    "linear": lambda b, m: linear(m, WEIGHTS),
    "task_arithmetic": lambda b, m: task_arithmetic(b, m, WEIGHTS, lambda_=0.7),
    "task_arithmetic, normalised": lambda b, m: task_arithmetic(b, m, WEIGHTS, normalize=True),
    "task_arithmetic, negative": lambda b, m: task_arithmetic(b, m, [-0.5, 1, 2], lambda_=0.5),
    "ties": lambda b, m: ties(b, m, WEIGHTS, [0.2, 0.5, 1.0], lambda_=1.5),
    "ties, count": lambda b, m: ties(b, m, WEIGHTS, 0.3, sign="count"),
    "ties, negative": lambda b, m: ties(b, m, [-0.5, 1, 2], 0.6, normalize=False),
    "breadcrumbs": lambda b, m: breadcrumbs(b, m, WEIGHTS, [0.4, 0.5, 0.9], 0.05),
    "breadcrumbs_ties": lambda b, m: breadcrumbs(b, m, WEIGHTS, 0.5, 0.1, sign="mass"),
    "nearswap": lambda b, m: nearswap(b, m[0], 0.5),
}
RANDOM: dict[str, Merge] = {
    "dare_linear": lambda b, m: dare(b, m, WEIGHTS, [0.5, 0.9, 1.0], lambda_=0.5),
    "dare_ties": lambda b, m: dare(b, m, WEIGHTS, 0.5, rescale=False, sign="mass"),
    "della": lambda b, m: della(b, m, WEIGHTS, [0.5, 0.4, 0.3], seed=3),
    "della, count": lambda b, m: della(b, m, WEIGHTS, 0.5, [0.1, 0.2, 0.0], sign="count"),
    "della_linear": lambda b, m: della(b, m, WEIGHTS, 0.5, sign=None, rescale=False),
}
ANGLES: dict[str, Merge] = {
    "slerp": lambda b, m: slerp(m[0], m[1], 0.3),
    "karcher": lambda b, m: spherical_mean(m, WEIGHTS),
    "model_stock": lambda b, m: model_stock(b, m),
}
ALL = ELEMENTWISE | RANDOM | ANGLES
"""By method, with a word after a comma for other settings of it."""
NOT_FUNCTIONS = {"passthrough"}
"""Methods that copy one model."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

every = pytest.mark.parametrize("name", ALL)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bits(tensor: Tensor) -> Tensor:
    """What tells -0 from 0."""
    return tensor.view(INTEGERS[tensor.element_size()])


def inputs(
    dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (30, 40), seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """A base and three fine-tunes of it."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    models = [base + 0.3 * torch.randn(shape, generator=generator) for _ in range(3)]
    return base.to(dtype), [model.to(dtype) for model in models]


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    """Within a tolerance of the largest magnitude."""
    worst = float((found.double() - expected.double()).abs().max())
    assert worst <= tolerance * float(expected.abs().max()), worst


def test_every_method_is_tested():
    assert {name.partition(",")[0] for name in ALL} == METHODS.keys() - NOT_FUNCTIONS


@every
@each_dtype
@pytest.mark.parametrize("shape", by_default([(7,), (33, 17), (300, 900)], (7,), (33, 17)))
def test_equal_models_merge_to_themselves(name: str, dtype: torch.dtype, shape: tuple[int, ...]):
    base, _ = inputs(dtype, shape)
    base.view(-1)[:3] = torch.tensor([-0.0, 0.0, torch.finfo(dtype).smallest_normal / 2])
    assert torch.equal(bits(ALL[name](base, [base] * 3)), bits(base))


@pytest.mark.parametrize("count", [2, 4, 5, 8])
def test_many_equal_models_have_themselves_as_their_mean(count: int):
    model, _ = inputs(shape=(300, 900))
    weights = [0.1 + 0.3 * i for i in range(count)]
    for result in (spherical_mean([model] * count, weights), linear([model] * count, weights)):
        assert torch.equal(bits(result), bits(model))


ORDERLESS: dict[str, Callable[[Tensor, Sequence[Tensor], Sequence[float]], Tensor]] = {
    "linear": lambda b, m, w: linear(m, w),
    "task arithmetic": task_arithmetic,
    "ties": lambda b, m, w: ties(b, m, w, 0.5),
    "ties, count": lambda b, m, w: ties(b, m, w, 0.5, sign="count"),
    "breadcrumbs": lambda b, m, w: breadcrumbs(b, m, w, 0.5, 0.1),
    "spherical mean": lambda b, m, w: spherical_mean(m, w),
    "model stock": lambda b, m, w: model_stock(b, m),
    "dare, all kept": lambda b, m, w: dare(b, m, w),
}


@pytest.mark.parametrize("name", ORDERLESS)
def test_the_order_of_the_models_does_not_matter(name: str):
    """Beyond rounding: in bfloat16, sums in another order round to another number once in a thousand."""
    base, models = inputs()
    small = base.bfloat16(), [model.bfloat16() for model in models]
    merge = ORDERLESS[name]
    for order in permutations(range(3)):
        weights = [WEIGHTS[i] for i in order]
        assert_close(merge(base, [models[i] for i in order], weights), merge(base, models, WEIGHTS))
        found = merge(small[0], [small[1][i] for i in order], weights)
        assert float((found == merge(*small, WEIGHTS)).double().mean()) > 0.99


def test_random_masks_go_by_place():
    base, models = inputs()
    assert not torch.equal(dare(base, models, density=0.5), dare(base, models[::-1], density=0.5))
    moved = dare(base, [base, models[0]], density=0.5), dare(base, [models[0], base], density=0.5)
    assert not torch.equal(*moved)


WEIGHTED: dict[str, Callable[[Tensor, Sequence[Tensor], Sequence[float]], Tensor]] = {
    **{name: ORDERLESS[name] for name in ORDERLESS if name != "model stock"},
    "dare": lambda b, m, w: dare(b, m, w, 0.5, sign="mass"),
    "della": lambda b, m, w: della(b, m, w, 0.5),
    "linear sum": lambda b, m, w: linear(m, w, normalize=False),
    "normalised": lambda b, m, w: task_arithmetic(b, m, w, normalize=True),
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_weight_of_zero_is_an_absent_model(name: str, dtype: torch.dtype):
    """To the bit; where masks are random, of the last model, so that the others keep their places."""
    base, models = inputs(dtype)
    merge, rest = WEIGHTED[name], WEIGHTS[:2]
    assert torch.equal(merge(base, models, [*rest, 0.0]), merge(base, models[:2], rest))
    if name not in ("dare", "della"):
        assert torch.equal(merge(base, [models[2], *models[:2]], [0.0, *rest]), merge(base, models[:2], rest))


@pytest.mark.parametrize("sign", ["mass", "count"])
def test_ties_of_density_1_is_task_arithmetic_where_signs_agree(sign: Literal["mass", "count"]):
    base, models = inputs(torch.float64)
    direction = torch.sign(models[0] - base)
    agreeing = [base + direction * (model - base).abs() for model in models]
    summed = ties(base, agreeing, WEIGHTS, normalize=False, lambda_=0.5, sign=sign)
    assert_close(summed, task_arithmetic(base, agreeing, WEIGHTS, lambda_=0.5), 1e-15)
    mean = ties(base, agreeing, WEIGHTS, sign=sign)
    assert_close(mean, task_arithmetic(base, agreeing, WEIGHTS, normalize=True), 1e-15)

    # Where they conflict, the two differ.
    apart = ties(base, models, WEIGHTS, normalize=False) - task_arithmetic(base, models, WEIGHTS)
    agree = torch.stack([torch.sign(model - base) for model in models]).sum(0).abs() == 3
    assert 0.1 < float(agree.double().mean()) < 0.4
    assert torch.equal(apart.abs() < 1e-14, agree)


@pytest.mark.parametrize("name", [name for name in ALL if name != "nearswap"])  # its t is a distance
def test_a_power_of_two_scales_the_result(name: str):
    base, models = inputs()
    scaled = ALL[name](base * 8, [model * 8 for model in models])
    assert torch.equal(scaled, ALL[name](base, models) * 8)


@every
def test_the_opposite_of_everything_has_the_opposite_result(name: str):
    base, models = inputs()
    assert torch.equal(ALL[name](-base, [-model for model in models]), -ALL[name](base, models))


@pytest.mark.parametrize("name", ["ties", "ties, count", "breadcrumbs_ties", "dare_ties", "della"])
def test_the_opposite_changes_are_merged_to_the_opposite_change(name: str):
    # Around a base of zero; were a tie won by plus, as in mergekit, this would not hold.
    _, models = inputs()
    zero = torch.zeros_like(models[0])
    models[2] = -models[0]
    assert torch.equal(ALL[name](zero, [-model for model in models]), -ALL[name](zero, models))


def test_lambda_scales_the_change():
    base, models = inputs(torch.float64)
    for merge in (task_arithmetic, ties, dare, della, breadcrumbs):
        one, three = merge(base, models, lambda_=1.0), merge(base, models, lambda_=-3.0)
        assert_close(three - base, -3 * (one - base), 1e-14)
        assert float((one - base).abs().max()) > 0.1


@every
def test_models_of_other_types_are_read_as_what_they_hold(name: str):
    base, models = inputs()
    mixed = [models[0].bfloat16(), models[1].half(), models[2]]
    found = ALL[name](base, mixed)
    assert torch.equal(found, ALL[name](base, [model.float() for model in mixed]).to(found.dtype))
    wide = [models[0].double(), *mixed[1:]]
    found = ALL[name](base.bfloat16(), wide)
    exact = ALL[name](base.bfloat16().double(), [model.double() for model in wide])
    assert torch.equal(found, exact.to(found.dtype)), "the arithmetic is float64, rounded once"


@every
@pytest.mark.parametrize("size", by_default([7, 40, 64, 1000], 40, 1000))
def test_the_block_length_does_not_matter(name: str, size: int, monkeypatch: pytest.MonkeyPatch):
    """To the bit; lengths and angles are sums over blocks, which may differ in the last bits."""
    base, models = inputs()
    whole = ALL[name](base, models)
    monkeypatch.setattr(blocks, "BLOCK", size)
    if name in ANGLES:
        assert_close(ALL[name](base, models), whole, 1e-6)
    else:
        assert torch.equal(ALL[name](base, models), whole)


@every
def test_tensors_of_several_blocks(name: str):
    base, models = inputs(shape=(700, 500))
    assert base.numel() > blocks.BLOCK
    found = ALL[name](base, models)
    # DELLA's probabilities may be rounded to another multiple of 1/65536.
    tolerance = 1e-4 if name.startswith("della") else 2e-6
    assert_close(found, ALL[name](base.double(), [model.double() for model in models]), tolerance)
    piece = slice(500, 600)
    if name in ("linear", "nearswap") or name.startswith("task"):
        parts = ALL[name](base[piece], [model[piece] for model in models])
        assert torch.equal(found[piece], parts)
