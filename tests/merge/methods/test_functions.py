"""The methods on numbers small enough to follow by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from raises import raises_error
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

BASE = torch.tensor([10.0, 10.0, 10.0, 10.0])


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def at(degrees: float, length: float = 1.0) -> Tensor:
    """A point of the plane."""
    return torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]) * length


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.allclose(found.double(), expected.double(), rtol=2e-6, atol=2e-7), f"{found} {expected}"


def test_linear():
    a, b = vector(1, 2), vector(3, -4)
    assert_close(linear([a, b]), vector(2, -1))
    # (1·1 + 3·3)/4 and (1·2 - 3·4)/4
    assert_close(linear([a, b], [1, 3]), vector(2.5, -2.5))
    assert_close(linear([a, b], [1, 3], normalize=False), vector(10, -10))
    # (2·1 - 3)/1 and (2·2 + 4)/1
    assert_close(linear([a, b], [2, -1]), vector(-1, 8))


def test_task_arithmetic():
    # τ = (1, -1) and (3, 1): 1 + 2(0.5·1 - 0.25·3) and 1 + 2(-0.5 - 0.25)
    base, models = vector(1, 1), [vector(2, 0), vector(4, 2)]
    assert_close(task_arithmetic(base, models, [0.5, -0.25], lambda_=2), vector(0.5, -0.5))
    # divided by 0.5 - 0.25
    assert_close(task_arithmetic(base, models, [0.5, -0.25], lambda_=2, normalize=True), vector(-1, -5))
    assert_close(task_arithmetic(base, models), vector(5, 1))


def test_ties():
    # Half of four elements: τ̂₁ = (4, -3, 0, 0), τ̂₂ = (0, -5, 2, 0); with weights 1 and 0.5 the signs are
    # those of (4, -5.5, 1, 0). The means of what agrees are 4/1, -(3 + 2.5)/1.5, 1/0.5.
    models = [BASE + vector(4, -3, 1, -0.5), BASE + vector(-1, -5, 2, 0.1)]
    assert_close(ties(BASE, models, [1, 0.5], 0.5), vector(14, 10 - 11 / 3, 12, 10))
    assert_close(ties(BASE, models, [1, 0.5], 0.5, lambda_=-0.5), vector(8, 10 + 11 / 6, 9, 10))
    assert_close(ties(BASE, models, [1, 0.5], 0.5, normalize=False), vector(14, 4.5, 11, 10))
    # A density for each: all of the first, (4, -3, 1, -0.5), and one of the second, (0, -5, 0, 0).
    assert_close(ties(BASE, models, [1, 0.5], [1, 0.25]), vector(14, 10 - 11 / 3, 11, 9.5))


def test_ties_elects_by_mass_or_by_count():
    # 5 - 2 - 2 > 0, but one plus stands against two minuses.
    base, models = vector(1), [vector(6), vector(-1), vector(-1)]
    assert_close(ties(base, models), vector(6))
    assert_close(ties(base, models, sign="count"), vector(-1))
    # Weights are part of the mass, 3 - 2·2 < 0, and not of the count, which is a tie.
    models = [vector(4), vector(-1)]
    assert_close(ties(base, models, [1, 2]), vector(-1))
    assert_close(ties(base, models, [1, 2], sign="count"), vector(1))

    # Where no sign wins, the base stays.
    base, models = vector(1, 2), [vector(4, 7), vector(-2, 2)]
    assert_close(ties(base, models), vector(1, 7))  # +3 and -3; +5 and 0
    assert_close(ties(base, models, sign="count"), vector(1, 7))


def test_ties_divides_by_the_sizes_of_negative_weights():
    # 0.6·1 and -0.5·-2 are both plus: (0.6 + 1.0)/(0.6 + 0.5); divided by 0.6 - 0.5 it would be 16.
    assert_close(ties(vector(0), [vector(1), vector(-2)], [0.6, -0.5]), vector(1.6 / 1.1))


def test_ties_keeps_equal_magnitudes_together():
    model = vector(1, -1, 0.5, 1)
    for density in (0.25, 0.5, 0.75):  # one, two or three elements: there are three that are the largest
        assert_close(ties(torch.zeros(4), [model], density=density), vector(1, -1, 0, 1))
    assert_close(ties(torch.zeros(4), [model], density=1), model)


@pytest.mark.parametrize(("density", "kept"), [(0.01, 1), (0.6, 1), (2 / 3, 2), (0.99, 2), (1, 3)])
def test_ties_keeps_the_floor_of_the_density_and_at_least_one(density: float, kept: int):
    result = ties(torch.zeros(3), [vector(-3, 2, 1)], density=density)
    assert result.tolist() == [-3, 2, 1][:kept] + [0] * (3 - kept)


def test_dare_keeps_a_share_and_divides_by_it():
    # 0.3·65536 = 19660.8: an element is kept with p = 19661/65536 and divided by exactly that.
    base, model = torch.zeros(100_000), torch.full((100_000,), 3.0)
    result = dare(base, [model], density=0.3)
    kept = result != 0
    assert result[kept].unique().tolist() == vector(3 * 65536 / 19661).tolist()
    # Five standard deviations of the mean of 100,000 draws: 5·sqrt(0.3·0.7/1e5).
    assert abs(kept.double().mean() - 0.3) < 0.0073
    plain = dare(base, [model], density=0.3, rescale=False)
    assert torch.equal(plain, kept * 3.0)


def test_dare_is_right_on_average():
    base, model = vector(1, 1, 1), vector(2, -3, 1.5)
    results = torch.stack([dare(base, [model], 2.0, 0.5, seed=seed) for seed in range(400)]).double()
    # An element of 2τ/p is 0 or 4τ, with standard deviation 2τ: five of the mean are 5·2τ/20.
    error = (results.mean(0) - vector(3, -7, 2)).abs() / vector(1, 4, 0.5)
    assert float(error.max()) < 0.5 and float(results.std(0).min()) > 0.5


def test_dare_adds_or_elects():
    base, models = vector(0, 0), [vector(2, 1), vector(-1, 3)]
    assert_close(dare(base, models), vector(1, 4))
    assert_close(dare(base, models, lambda_=-2), vector(-2, -8))
    assert_close(dare(base, models, [1, 3], normalize=True), vector(-0.25, 2.5))
    assert_close(dare(base, models, sign="mass"), vector(2, 4))  # not normalised unless asked for
    assert_close(dare(base, models, sign="mass", normalize=True), vector(2, 2))


def test_della_keeps_by_rank_in_the_row():
    # Ranks 0 to 3 of (1, -2, 3, -4): p = 0.5 - 0.3 + 0.6·rank/3 = 0.2, 0.4, 0.6, 0.8, rounded to 1/65536.
    rows = vector(1, -2, 3, -4)[torch.tensor([3, 0, 2, 1])].expand(20_000, 4)
    result = della(torch.zeros(20_000, 4), [rows], density=0.5, epsilon=0.3, sign=None)
    for column, levels in enumerate([52429, 13107, 39322, 26214]):
        kept = result[:, column] != 0
        scaled = result[:, column][kept]
        assert_close(scaled, (rows[:1, column] * 65536 / levels).expand_as(scaled))
        assert abs(kept.double().mean() - levels / 65536) < 0.018  # five of sqrt(0.25/20000)
    plain = della(torch.zeros(20_000, 4), [rows], density=0.5, epsilon=0.3, sign=None, rescale=False)
    assert torch.equal(plain, rows * (result != 0))


def test_della_elects_unless_told_not_to():
    base, models = vector(0, 0), [vector(2, 1), vector(-1, 3)]
    assert_close(della(base, models), vector(2, 2))  # density 1 keeps all: the means of those that agree
    assert_close(della(base, models, sign="count"), vector(0, 2))
    assert_close(della(base, models, sign=None), vector(1, 4))

    # Of one column, with the density.
    column = torch.ones(40_000, 1)
    kept = della(torch.zeros(40_000, 1), [column], density=0.25, epsilon=0.2, sign=None)
    assert kept.unique().tolist() == [0, 4]
    assert abs(float((kept != 0).double().mean()) - 0.25) < 0.0109  # five of sqrt(0.1875/40000)


def test_breadcrumbs():
    model = vector(5, -4, 3, -2, 1)
    # Two of five, without the largest one; then without the three largest, though 4 of 5 are asked for.
    assert_close(breadcrumbs(torch.zeros(5), [model], 2.0, 0.4, 0.2), vector(0, -8, 6, 0, 0))
    assert_close(breadcrumbs(torch.zeros(5), [model], 1.0, 0.4, 0.8), vector(0, 0, 0, -2, 1))
    assert_close(breadcrumbs(torch.zeros(5), [model], 1.0, 0.4, 0.0), vector(5, -4, 0, 0, 0))
    # ⌊0.39·5⌋ = 1 element is dropped; where all are to be kept, none is.
    assert_close(breadcrumbs(torch.zeros(5), [model], 1.0, 0.2, 0.39), vector(0, -4, 0, 0, 0))
    assert_close(breadcrumbs(torch.zeros(5), [model], 1.0, 1.0, 0.9), model)

    # Kept are (0, -3, 2) and (5, 3, 0): -3 and 3 are a tie.
    models = [vector(9, -3, 2), vector(5, 3, 8)]
    assert_close(
        breadcrumbs(torch.zeros(3), models, density=2 / 3, gamma=1 / 3, sign="mass", lambda_=2),
        vector(10, 0, 4),
    )


@pytest.mark.parametrize("turn", [0, 100, 200])
def test_slerp_turns_unit_vectors(turn: float):
    for far, t in ((90, 0.25), (60, 1 / 3)):
        expected = at(far * t + turn)
        assert_close(slerp(at(turn), at(far + turn), t), expected)
        assert_close(slerp(at(far + turn), at(turn), 1 - t), expected)


def test_slerp_of_other_lengths_and_an_obtuse_angle():
    # sin 45°/sin 90° of each.
    assert_close(slerp(vector(2, 0), vector(0, 1)), vector(2, 1) * math.sqrt(0.5))
    # θ = 120°, t = 1/4: sin 90°/sin 120° of the first, sin 30°/sin 120° of the second.
    expected = (at(0, 3) * 1 + at(120, 5) * 0.5) / math.sin(math.radians(120))
    assert_close(slerp(at(0, 3), at(120, 5), 0.25), expected)


@pytest.mark.parametrize("t", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("first", [vector(3, 3), vector(-1, -1), vector(0, 0)])
def test_slerp_takes_a_straight_line_where_there_is_no_arc(first: Tensor, t: float):
    assert_close(slerp(first, vector(1, 1), t), first * (1 - t) + vector(1, 1) * t)


def test_slerp_is_straight_from_a_cosine_of_0_9995_on():
    # cos 1.8° = 0.99951 and cos 1.9° = 0.99945: a chord's middle lies inside of the circle, at cos(θ/2).
    chord, arc = slerp(at(0).double(), at(1.8).double()), slerp(at(0).double(), at(1.9).double())
    assert float(chord.norm()) == pytest.approx(math.cos(math.radians(0.9)), abs=1e-7)
    assert float(arc.norm()) == pytest.approx(1, abs=1e-7)


def test_spherical_mean():
    # Of two, SLERP's direction at the mean length: (2 + 4)/2, and (3·2 + 4)/4 at 90°·1/4.
    assert_close(spherical_mean([at(0, 2), at(90, 4)]), at(45, 3))
    assert_close(spherical_mean([at(0, 2), at(90, 4)], [3, 1]), at(22.5, 2.5))
    assert_close(spherical_mean([at(0), at(120), at(60)]), at(60))
    assert_close(spherical_mean(list(torch.eye(3))), torch.full((3,), math.sqrt(1 / 3)))
    # The mean of angles on a circle, not of vectors: (0 + 0 + 90)/3.
    assert_close(spherical_mean([at(0), at(0), at(90)], max_iter=50, tol=1e-9), at(30))
    assert_close(spherical_mean([*[at(0)] * 5, at(150)], max_iter=99, tol=1e-9), at(25))


def test_spherical_mean_leaves_out_what_has_no_direction_or_weight():
    # The zero tensor still counts in the mean length.
    assert_close(spherical_mean([vector(2, 0), vector(0, 0)]), vector(1, 0))
    assert_close(spherical_mean([vector(2, 0), vector(0, 5)], [1, 0]), vector(2, 0))
    assert_close(spherical_mean([vector(0, 0), vector(0, 0)]), vector(0, 0))
    # Opposite directions have every mean; it is the first one's.
    assert_close(spherical_mean([vector(2, 0), vector(-2, 0)]), vector(2, 0))


@pytest.mark.parametrize("count", [3, 5])
def test_spherical_mean_balances_the_angles(count: int):
    """At the mean m, the tangents θᵢ/sin θᵢ (uᵢ - cos θᵢ m) cancel out."""
    generator = torch.Generator().manual_seed(count)
    tensors = [torch.randn(6, generator=generator).double() + 1 for _ in range(count)]
    weights = torch.rand(count, generator=generator).double() + 0.1
    mean = spherical_mean(tensors, weights.tolist(), max_iter=100, tol=1e-12)
    lengths = torch.stack([tensor.norm() for tensor in tensors])
    assert float(mean.norm()) == pytest.approx(float((weights @ lengths) / weights.sum()), rel=1e-9)
    mean = mean / mean.norm()
    total = torch.zeros(6).double()
    for tensor, weight in zip(tensors, weights, strict=True):
        cosine = tensor / tensor.norm() @ mean
        angle = cosine.acos()
        total += weight * angle / angle.sin() * (tensor / tensor.norm() - cosine * mean)
    assert float(total.norm()) < 1e-9


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        # cos θ = 0: the models agree on nothing.
        ([vector(3, 0), vector(0, 1)], vector(0, 0)),
        # cos θ = 1: t = 1, the mean.
        ([vector(3, 0), vector(1, 0)], vector(2, 0)),
        # cos 60° = 1/2: t = 2·0.5/1.5 = 2/3 of the mean (0.75, 0.433).
        ([at(0), at(60)], vector(0.5, math.sqrt(3) / 6)),
        # cos 120° = -1/2: the formula's t = -1/0.5 would lead away from both.
        ([at(0), at(120)], vector(0, 0)),
        # Three at 120° and two at 180°: 1 + (n-1) cos θ = 0, there is no t.
        ([at(0), at(120), at(240)], vector(0, 0)),
        ([at(0), at(180)], vector(0, 0)),
        # Pairs of 60°, 60° and 120°: cos θ = 1/6, t = 0.5/(4/3) = 3/8 of the mean (1/3, 0.577).
        ([at(0), at(60), at(120)], vector(0.125, math.sqrt(3) / 8)),
        # A model equal to the base has no angle: cos θ = 0.
        ([vector(3, 0), vector(0, 0)], vector(0, 0)),
    ],
)
def test_model_stock(models: list[Tensor], expected: Tensor):
    base = vector(1, -2)
    assert_close(model_stock(base, [base + model for model in models]), base + expected)


def test_nearswap():
    base = vector(1, 1, 1, 1)
    assert_close(nearswap(base, base + vector(0.5, -0.5, 2, -3), 1), base + vector(0.5, -0.5, 1, -1))
    assert torch.equal(nearswap(base, vector(5, 5, 5, 5), 0), base)


def test_what_comes_back():
    base = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    turned = torch.ones(3, 2).T
    result = ties(base, [turned, turned.double()])
    assert (result.shape, result.dtype, result.requires_grad) == ((2, 3), torch.bfloat16, False)
    assert result.is_contiguous() and torch.equal(result, torch.ones(2, 3).bfloat16())
    assert float(linear([torch.tensor(1.0), torch.tensor(2.0)])) == 1.5
    assert ties(torch.zeros(0, 4), [torch.zeros(0, 4)], density=0.5).shape == (0, 4)
    assert della(torch.zeros(4, 0), [torch.zeros(4, 0)], density=0.5).shape == (4, 0)


def test_inputs_stay_as_they_are():
    torch.manual_seed(0)
    base, models = torch.randn(5, 4), [torch.randn(5, 4) for _ in range(3)]
    before = [tensor.clone() for tensor in (base, *models)]
    ties(base, models, density=0.5)
    della(base, models, density=0.5)
    linear(models)
    slerp(base, models[0])
    assert all(torch.equal(x, y) for x, y in zip(before, (base, *models), strict=True))


A, B = vector(1, 2), vector(3, 5)
UNKNOWN_SIGN: dict[str, Any] = {"sign": "vote"}


@pytest.mark.parametrize(
    ("merge", "message"),
    [
        (lambda: linear([A, vector(1)]), r"tensors must have one shape, got \[\(1,\), \(2,\)\]"),
        (lambda: linear([A, torch.tensor([1, 2])]), "tensors must be floating-point"),
        (lambda: linear([A, B], [1, 2, 3]), "weight must be one number or 2, one for each tensor, got 3"),
        (lambda: linear([A, B], [1, -1]), "weights 1, -1"),
        (lambda: linear([A, B], math.nan), "weight is nan"),
        (lambda: linear([]), "at least 1 tensors besides the base are needed, got 0"),
        (lambda: linear([A, vector(1, math.nan)]), r"holds nan at \(1,\)"),
        (lambda: linear([vector(-math.inf, 1), A]), r"holds -inf at \(0,\)"),
        (lambda: ties(A, [B], 1, 1.5), "density is 1.5, expected a finite number > 0 and <= 1"),
        (lambda: ties(A, [B], **UNKNOWN_SIGN), "sign is 'vote', expected mass or count"),
        (lambda: dare(A, [B], 1, [0.5, 0.5]), "density must be one number or 1"),
        (lambda: della(A, [B], 1, 0.1, 0.1), r"density .* and epsilon"),
        (lambda: spherical_mean([A, B], [2, -1]), "needs weights >= 0"),
        (lambda: spherical_mean([A, B], max_iter=0), "max_iter is 0"),
        (lambda: model_stock(A, [B]), "at least 2 tensors besides the base are needed, got 1"),
        (lambda: nearswap(A, B, -1), "t is -1"),
    ],
)
def test_refused(merge: Callable[[], Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        merge()


def test_an_infinity_is_found_in_a_sum_that_overflows():
    huge = torch.full((3, 4), 3e38)  # the sum is infinite and nothing else is
    assert torch.equal(linear([huge, huge]), huge)
    huge[2, 1] = math.inf
    with raises_error("non_finite_value", model="input 1", index=(2, 1)):
        linear([torch.ones(3, 4), huge])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_the_result_cannot_hold_is_refused(dtype: torch.dtype, sign: float):
    base, largest = torch.zeros(2, dtype=dtype), torch.finfo(dtype).max
    model = torch.tensor([1.0, sign * largest], dtype=dtype)
    assert torch.equal(task_arithmetic(base, [model]), model)
    with raises_error("overflow"):
        task_arithmetic(base, [model], 2.0)
