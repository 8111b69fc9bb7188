"""The methods against their formulas, written down once more in float64 with sorts and without blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import rlhf_merge as ours
from proofs import by_default

WEIGHTS = [0.71, -0.233, 0.9371]
"""No small multiples of each other: sums that cancel out in one arithmetic and not in the other are rare."""
POSITIVE = [0.7, 0.2, 0.9]

Merge = Callable[[Tensor, Sequence[Tensor]], Tensor]


def linear(base: Tensor, models: Sequence[Tensor]) -> Tensor:
    total = sum(w * model for w, model in zip(WEIGHTS, models, strict=True))
    return torch.as_tensor(total) / sum(WEIGHTS)


def task_arithmetic(base: Tensor, models: Sequence[Tensor]) -> Tensor:
    return base + 0.8 * sum(w * (model - base) for w, model in zip(WEIGHTS, models, strict=True))


def trimmed(delta: Tensor, density: float, gamma: float = 0.0) -> Tensor:
    """Without the smallest elements, and without a share gamma of the largest."""
    order = delta.abs().flatten().sort(descending=True).values
    dropped = math.floor(gamma * delta.numel())
    low, high = order[math.floor(density * delta.numel()) + dropped - 1], order[dropped]
    return delta * ((delta.abs() >= low) & (delta.abs() <= high))


def elected(deltas: Sequence[Tensor], sign: str) -> Tensor:
    weighted = [w * delta for w, delta in zip(WEIGHTS, deltas, strict=True)]
    winner = torch.stack(weighted if sign == "mass" else [torch.sign(d) for d in weighted]).sum(0).sign()
    agree = [(torch.sign(delta) == winner) & (winner != 0) for delta in weighted]
    total = torch.stack([d * a for d, a in zip(weighted, agree, strict=True)]).sum(0)
    divisor = torch.stack([abs(w) * a.double() for w, a in zip(WEIGHTS, agree, strict=True)]).sum(0)
    return torch.where(divisor > 0, total / divisor, torch.zeros_like(total))


def ties(base: Tensor, models: Sequence[Tensor], sign: str = "mass") -> Tensor:
    return base + 1.3137 * elected([trimmed(model - base, 0.4) for model in models], sign)


def breadcrumbs(base: Tensor, models: Sequence[Tensor]) -> Tensor:
    deltas = [trimmed(model - base, 0.6, 0.1) for model in models]
    return base + sum(w * delta for w, delta in zip(WEIGHTS, deltas, strict=True))


def slerp(base: Tensor, models: Sequence[Tensor]) -> Tensor:
    first, second = models[:2]
    angle = torch.acos((first * second).sum() / first.norm() / second.norm())
    return (torch.sin(0.7 * angle) * first + torch.sin(0.3 * angle) * second) / torch.sin(angle)


def spherical_mean(base: Tensor, models: Sequence[Tensor]) -> Tensor:
    units = [model / model.norm() for model in models]
    mean = torch.stack([w * unit for w, unit in zip(POSITIVE, units, strict=True)]).sum(0)
    mean = mean / mean.norm()
    for _ in range(60):
        tangent = torch.zeros_like(mean)
        for weight, unit in zip(POSITIVE, units, strict=True):
            cosine = (unit * mean).sum()
            angle = torch.acos(cosine)
            tangent += weight / sum(POSITIVE) * angle / torch.sin(angle) * (unit - cosine * mean)
        step = tangent.norm()
        mean = torch.cos(step) * mean + torch.sin(step) * tangent / step.clamp(min=1e-30)
    length = sum(w * float(model.norm()) for w, model in zip(POSITIVE, models, strict=True))
    return mean * length / sum(POSITIVE)


def model_stock(base: Tensor, models: Sequence[Tensor]) -> Tensor:
    deltas = [model - base for model in models]
    pairs = [(0, 1), (0, 2), (1, 2)]
    cosines = [(deltas[i] * deltas[j]).sum() / deltas[i].norm() / deltas[j].norm() for i, j in pairs]
    cosine = torch.stack(cosines).mean()
    return base + 3 * cosine / (1 + 2 * cosine) * torch.stack(deltas).mean(0)


def nearswap(base: Tensor, models: Sequence[Tensor]) -> Tensor:
    delta = models[0] - base
    return base + (0.2 / delta.abs()).clamp(max=1) * delta


PAIRS: dict[str, tuple[Merge, Merge]] = {
    "linear": (linear, lambda b, m: ours.linear(m, WEIGHTS)),
    "task arithmetic": (task_arithmetic, lambda b, m: ours.task_arithmetic(b, m, WEIGHTS, lambda_=0.8)),
    "ties": (ties, lambda b, m: ours.ties(b, m, WEIGHTS, 0.4, lambda_=1.3137)),
    "ties, count": (
        lambda b, m: ties(b, m, "count"),
        lambda b, m: ours.ties(b, m, WEIGHTS, 0.4, lambda_=1.3137, sign="count"),
    ),
    "breadcrumbs": (breadcrumbs, lambda b, m: ours.breadcrumbs(b, m, WEIGHTS, 0.6, 0.1)),
    "slerp": (slerp, lambda b, m: ours.slerp(m[0], m[1], 0.3)),
    "spherical mean": (
        spherical_mean,
        lambda b, m: ours.spherical_mean(m, POSITIVE, max_iter=60, tol=1e-13),
    ),
    "model stock": (model_stock, lambda b, m: ours.model_stock(b, m)),
    "nearswap": (nearswap, lambda b, m: ours.nearswap(b, m[0], 0.2)),
}


def fine_tunes(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """A base and three models that went the same way in part."""
    generator = torch.Generator().manual_seed(shape[0])
    base, common = torch.randn(2, *shape, generator=generator)
    models = [base + 0.3 * common + 0.3 * torch.randn(shape, generator=generator) for _ in range(3)]
    return base.to(dtype), [model.to(dtype) for model in models]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", by_default([(20, 31), (600, 500)], (20, 31)))
def test_float32_arithmetic_is_within_1e_6_of_float64(name: str, shape: tuple[int, int]):
    expected, found = PAIRS[name]
    base, models = fine_tunes(shape, torch.float32)
    exact = expected(base.double(), [model.double() for model in models])
    error = float((found(base, models) - exact).abs().max() / exact.abs().max())
    assert error < 1e-6
    wide = found(base.double(), [model.double() for model in models])
    assert float((wide - exact).abs().max()) < 1e-12


@pytest.mark.parametrize("name", PAIRS)
def test_bfloat16_results_are_rounded_once(name: str):
    """Within half a unit in the last of bfloat16's eight digits, and nearly everywhere the nearest number."""
    expected, found = PAIRS[name]
    base, models = fine_tunes((200, 300), torch.bfloat16)
    exact = expected(base.double(), [model.double() for model in models])
    result = found(base, models)
    assert result.dtype == torch.bfloat16
    assert bool(((result.double() - exact).abs() <= exact.abs() / 256 * (1 + 1e-3) + 2e-6).all())
    assert float((result == exact.bfloat16()).double().mean()) > 0.999
