"""The methods as pure functions on tensors; models on disk are merged by the same code, tensor by tensor.

Every function takes tensors of one shape and returns a new one of the first one's type. The arithmetic is
float32, or float64 where an input is. A weight or a density may be one number or one for each tensor. θ are
the tensors, θ₀ the base, τᵢ = θᵢ - θ₀ the task vectors, n the number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from rlhf_merge.methods.blocks import Inputs, MemoryTensor, Workspace, check_range, working_dtype
from rlhf_merge.methods.catalog import METHODS, PARAMETERS, PER_MODEL
from rlhf_merge.methods.values import Values

Numbers = float | Sequence[float]
Sign = Literal["mass", "count"]


class Summing(TypedDict, total=False):
    """How sparse task vectors are added up, as keywords; what is left out is the method's default.

    `lambda_`: factor λ of the sum. `normalize`: see `ties` and `task_arithmetic`. `sign`: see `ties`; None
    elects no signs and adds up as `task_arithmetic` does.
    """

    lambda_: float
    normalize: bool
    sign: Sign | None


def linear(tensors: Sequence[Tensor], weights: Numbers = 1.0, *, normalize: bool = True) -> Tensor:
    """Weighted mean Σ wᵢ θᵢ / Σ wᵢ; without `normalize` the sum. With equal weights, the uniform soup.

    Wortsman et al. (2022), Model soups, arXiv:2203.05482, section 2.

    Args:
        tensors: one or more, of one shape.
        weights: wᵢ.
        normalize: divide by Σ wᵢ.

    Raises:
        ValueError: shapes differ, or the weights sum to zero.
    """
    return _merge("linear", None, tensors, {"weight": weights, "normalize": normalize})


def task_arithmetic(
    base: Tensor,
    tensors: Sequence[Tensor],
    weights: Numbers = 1.0,
    *,
    lambda_: float = 1.0,
    normalize: bool = False,
) -> Tensor:
    """θ₀ + λ Σ wᵢ τᵢ; with `normalize` divided by Σ wᵢ.

    Ilharco et al. (2023), Editing models with task arithmetic, arXiv:2212.04089, section 2.

    Args:
        base: θ₀.
        tensors: θᵢ.
        weights: wᵢ; a negative one forgets a task.
        lambda_: λ.
        normalize: divide by Σ wᵢ.

    Raises:
        ValueError: shapes differ, or the weights to divide by sum to zero.
    """
    shared = {"weight": weights, "lambda": lambda_, "normalize": normalize}
    return _merge("task_arithmetic", base, tensors, shared)


def ties(
    base: Tensor,
    tensors: Sequence[Tensor],
    weights: Numbers = 1.0,
    density: Numbers = 1.0,
    *,
    lambda_: float = 1.0,
    normalize: bool = True,
    sign: Sign = "mass",
) -> Tensor:
    """Trim, elect signs, merge what agrees: θ₀ + λ σ Σ wᵢ|τ̂ᵢ| / Σ |wᵢ| over the i with sgn(wᵢ τ̂ᵢ) = σ.

    τ̂ᵢ keeps the elements of τᵢ at least as large as its ⌊density·n⌋-th largest magnitude: of equal ones all
    or none. σ is the sign of Σ wᵢ τ̂ᵢ ("mass"), or of the positive ones less the negative ones ("count");
    where neither sign wins the base stays. Yadav et al. (2023), TIES-Merging, arXiv:2306.01708, section 3,
    algorithm 1.

    Args:
        base: θ₀.
        tensors: θᵢ.
        weights: wᵢ.
        density: share of elements to keep, in (0, 1].
        lambda_: λ.
        normalize: divide by the weights that agree (the paper's disjoint mean); without it, add.
        sign: how σ is elected.

    Raises:
        ValueError: shapes differ, or a density is outside (0, 1].
    """
    shared = {"weight": weights, "density": density, "lambda": lambda_, "normalize": normalize, "sign": sign}
    return _merge("ties", base, tensors, shared)


def dare(
    base: Tensor,
    tensors: Sequence[Tensor],
    weights: Numbers = 1.0,
    density: Numbers = 1.0,
    *,
    rescale: bool = True,
    seed: int = 0,
    name: str = "",
    **summing: Unpack[Summing],
) -> Tensor:
    """Drop elements at random and rescale: θ₀ + λ Σ wᵢ mᵢ τᵢ / p with mᵢ ~ Bernoulli(p), p the density.

    With a `sign` the merge is that of `ties` (DARE-TIES), else that of `task_arithmetic`. Yu et al. (2024),
    Language models are Super Mario, arXiv:2311.03099, section 3.2 (its drop rate is 1 - p).

    Args:
        base: θ₀.
        tensors: θᵢ.
        weights: wᵢ.
        density: p, in (0, 1], rounded to a multiple of 1/65536.
        rescale: divide what is kept by p, so that its expectation is τᵢ.
        seed: of the masks.
        name: of the tensor; masks depend on the seed, the name and the place among `tensors` alone.
        **summing: see `Summing`.

    Raises:
        ValueError: shapes differ, or a density is outside (0, 1].
    """
    given = {"weight": weights, "density": density, "rescale": rescale}
    return _sparse(("dare_linear", "dare_ties"), base, tensors, given, summing, (seed, name))


def della(
    base: Tensor,
    tensors: Sequence[Tensor],
    weights: Numbers = 1.0,
    density: Numbers = 1.0,
    epsilon: Numbers = 0.15,
    *,
    rescale: bool = True,
    seed: int = 0,
    name: str = "",
    **summing: Unpack[Summing],
) -> Tensor:
    """DARE with probabilities pⱼ = density - ε + 2ε rⱼ/(c-1) by the rank rⱼ of |τⱼ| in its row of c elements.

    Rows are those of the last dimension; what is kept is divided by its own pⱼ. With a `sign` the merge is
    that of `ties`, without one that of `task_arithmetic`. Deep et al. (2024), DELLA-Merging,
    arXiv:2406.11617, section 3.

    Args:
        base: θ₀.
        tensors: θᵢ.
        weights: wᵢ.
        density: mean of the probabilities, in (0, 1]; 1 keeps everything.
        epsilon: ε ≥ 0; density ± ε must lie in (0, 1].
        rescale: divide what is kept by its probability.
        seed: of the masks.
        name: see `dare`.
        **summing: see `Summing`.

    Raises:
        ValueError: shapes differ, or a density or ε is out of range.
    """
    given = {"weight": weights, "density": density, "epsilon": epsilon, "rescale": rescale}
    signed: Summing = {"sign": "mass", **summing}
    return _sparse(("della_linear", "della"), base, tensors, given, signed, (seed, name))


def breadcrumbs(
    base: Tensor,
    tensors: Sequence[Tensor],
    weights: Numbers = 1.0,
    density: Numbers = 0.9,
    gamma: Numbers = 0.01,
    **summing: Unpack[Summing],
) -> Tensor:
    """Task vectors without their ⌊γ·n⌋ largest and without their smallest elements, ⌊density·n⌋ in all.

    Where density + γ exceeds 1, fewer of the largest are dropped, none at 1. With a `sign` the merge is that
    of `ties`, without one that of `task_arithmetic`. Davari & Belilovsky (2023), Model Breadcrumbs,
    arXiv:2312.06795, section 3.

    Args:
        base: θ₀.
        tensors: θᵢ.
        weights: wᵢ.
        density: share of elements to keep, in (0, 1].
        gamma: γ, share of the largest elements to drop, in [0, 1].
        **summing: see `Summing`.

    Raises:
        ValueError: shapes differ, or a density or γ is out of range.
    """
    given = {"weight": weights, "density": density, "gamma": gamma}
    return _sparse(("breadcrumbs", "breadcrumbs_ties"), base, tensors, given, summing)


def slerp(first: Tensor, second: Tensor, t: float = 0.5) -> Tensor:
    """(sin((1-t)θ) a + sin(tθ) b) / sin θ, θ the angle of a and b; a straight line where |cos θ| > 0.9995.

    Shoemake (1985), Animating rotation with quaternion curves, section 3.3.

    Args:
        first: a, the result at t = 0.
        second: b, the result at t = 1.
        t: in [0, 1].

    Raises:
        ValueError: shapes differ, or t is out of range.
    """
    return _merge("slerp", None, [first, second], {"t": t})


def spherical_mean(
    tensors: Sequence[Tensor], weights: Numbers = 1.0, *, max_iter: int = 10, tol: float = 1e-5
) -> Tensor:
    """SLERP for any number of tensors: the Karcher mean of their directions at the mean of their lengths.

    The direction m minimises Σ wᵢ arccos²(m·θᵢ/|θᵢ|). Karcher (1977), Riemannian center of mass; for
    merging, arXiv:2603.04972.

    Args:
        tensors: θᵢ.
        weights: wᵢ ≥ 0.
        max_iter: most iterations.
        tol: length of a step, in radians, at which they end.

    Raises:
        ValueError: shapes differ, or a weight is negative, or all are zero.
    """
    return _merge("karcher", None, tensors, {"weight": weights, "max_iter": max_iter, "tol": tol})


def model_stock(base: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """θ₀ + t (mean of θᵢ - θ₀) with t = n cos θ / (1 + (n-1) cos θ).

    cos θ is the mean cosine between two task vectors; where it is not positive, t is 0. Jang et al. (2024),
    Model Stock, arXiv:2403.19522, eq. 8.

    Args:
        base: θ₀.
        tensors: θᵢ, two or more (n).

    Raises:
        ValueError: shapes differ, or there is one tensor only.
    """
    return _merge("model_stock", base, tensors, {})


def nearswap(base: Tensor, other: Tensor, t: float = 0.001) -> Tensor:
    """θ₀ + clip(θ₁ - θ₀, -t, t): elements near the base's are taken over, others move by t.

    Args:
        base: θ₀.
        other: θ₁.
        t: farthest an element may move, ≥ 0.

    Raises:
        ValueError: shapes differ, or t is negative.
    """
    return _merge("nearswap", base, [other], {"t": t})


def _sparse(
    methods: tuple[str, str],
    base: Tensor,
    tensors: Sequence[Tensor],
    given: dict[str, Any],
    summing: Summing,
    random: tuple[int, str] = (0, ""),
) -> Tensor:
    """The first of the methods, or the second where signs are elected."""
    sign = summing.get("sign")
    given |= {"sign": sign} if sign else {}
    given |= {"lambda": summing["lambda_"]} if "lambda_" in summing else {}
    given |= {"normalize": summing["normalize"]} if "normalize" in summing else {}
    return _merge(methods[sign is not None], base, tensors, given, *random)


def _merge(
    method: str,
    base: Tensor | None,
    tensors: Sequence[Tensor],
    given: dict[str, Any],
    seed: int = 0,
    name: str = "",
) -> Tensor:
    every = [*([base] if base is not None else []), *tensors]
    _check(method, every, len(tensors))
    per_model = [{} for _ in tensors]
    shared = {}
    for key, value in (METHODS[method].parameters | given).items():
        if key in PER_MODEL:
            for own, number in zip(per_model, _each(key, value, len(tensors)), strict=True):
                own[key] = _checked(key, number)
        else:
            shared[key] = _checked(key, value)
    _check_probabilities(per_model)
    first = every[0]
    memory = [MemoryTensor(tensor.detach()) for tensor in every]
    models = tuple(memory[len(every) - len(tensors) :])
    inputs = Inputs(name, memory[0] if base is not None else None, models, seed=seed)
    space = Workspace(working_dtype([tensor.dtype for tensor in every]), first.device)
    step = METHODS[method].fitting(inputs, Values(tuple(per_model), shared), space)
    out = torch.empty_like(first, memory_format=torch.contiguous_format)
    for start, stop in inputs.ranges(step.row_length):
        merged = step(start, stop, space)
        check_range(merged, out.dtype, name)
        out.view(-1)[start:stop] = merged
    return out


def _check(method: str, tensors: Sequence[Tensor], models: int) -> None:
    least = METHODS[method].models[0]
    if models < least:
        raise ValueError(f"{method} needs at least {least} tensors besides the base, got {models}")
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"tensors must have one shape, got {sorted(shapes)}")
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError(f"tensors must be floating-point, got {[tensor.dtype for tensor in tensors]}")


def _each(key: str, value: Any, count: int) -> list[float]:
    if isinstance(value, int | float) or getattr(value, "ndim", None) == 0:
        return [float(value)] * count
    numbers = [float(number) for number in value]
    if len(numbers) != count:
        raise ValueError(f"{key} must be one number or {count}, one for each tensor, got {len(numbers)}")
    return numbers


def _check_probabilities(per_model: Sequence[dict[str, float]]) -> None:
    for own in per_model:
        density, epsilon = own.get("density", 1.0), own.get("epsilon", 0.0)
        # 1e-9 is for sums such as 0.9 + 0.1 that rounding may put above one.
        if density < 1 and (density - epsilon <= 0 or density + epsilon > 1 + 1e-9):
            raise ValueError(
                "density - epsilon must be > 0 and density + epsilon ≤ 1, "
                f"got density {density} and epsilon {epsilon}"
            )


def _checked(key: str, value: Any) -> Any:
    rule = PARAMETERS[key]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, got {value}")
    if rule.choices and value not in rule.choices:
        raise ValueError(f"{key} must be one of {rule.choices}, got {value!r}")
    if rule.low is not None and (value < rule.low or (rule.low_open and value == rule.low)):
        raise ValueError(f"{key} must be {'>' if rule.low_open else '≥'} {rule.low:g}, got {value}")
    if rule.high is not None and value > rule.high:
        raise ValueError(f"{key} must be ≤ {rule.high:g}, got {value}")
    return value
