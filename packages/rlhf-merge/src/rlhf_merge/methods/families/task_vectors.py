"""Sums of task vectors, whole (task arithmetic) or sparse (TIES, DARE, DELLA, breadcrumbs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from rlhf_merge.methods.spec import Method, Numbers, Parameter, Scalar, Step, Values, merge

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.arithmetic import Sparsify
    from rlhf_merge.methods.blocks import Inputs, Workspace

Sign = Literal["mass", "count"]


class Summing(TypedDict, total=False):
    """How sparse task vectors are added up, as keywords; what is left out is the method's default.

    `lambda_`: factor λ of the sum. `normalize`: see `ties` and `task_arithmetic`. `sign`: see `ties`; None
    elects no signs and adds up as `task_arithmetic` does.
    """

    lambda_: float
    normalize: bool
    sign: Sign | None


def _given(summing: Summing, **others: Any) -> dict[str, Any]:
    return others | {key.rstrip("_"): value for key, value in summing.items() if value is not None}


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
    given = {"weight": weights, "lambda": lambda_, "normalize": normalize}
    return merge("task_arithmetic", base, tensors, given)


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
    given = {"weight": weights, "density": density, "lambda": lambda_, "normalize": normalize, "sign": sign}
    return merge("ties", base, tensors, given)


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
    method = "dare_ties" if summing.get("sign") else "dare_linear"
    given = _given(summing, weight=weights, density=density, rescale=rescale)
    return merge(method, base, tensors, given, seed, name)


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
    arXiv:2406.11617, section 3. Other arguments are those of `dare`.

    Args:
        base: θ₀.
        tensors: θᵢ.
        weights: wᵢ.
        density: mean of the probabilities, in (0, 1]; 1 keeps everything.
        epsilon: ε ≥ 0; density ± ε must lie in (0, 1].
        rescale: divide what is kept by its probability.
        seed: of the masks.
        name: of the tensor.
        **summing: see `Summing`.

    Raises:
        ValueError: shapes differ, or a density or ε is out of range.
    """
    method = "della" if summing.get("sign", "mass") else "della_linear"
    given = _given(summing, weight=weights, density=density, epsilon=epsilon, rescale=rescale)
    return merge(method, base, tensors, given, seed, name)


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
    method = "breadcrumbs_ties" if summing.get("sign") else "breadcrumbs"
    return merge(method, base, tensors, _given(summing, weight=weights, density=density, gamma=gamma))


def _fit_whole(inputs: Inputs, values: Values, space: Workspace) -> Step:
    from rlhf_merge.methods.arithmetic import sum_task_vectors

    return sum_task_vectors(inputs, values, [None] * len(inputs.models))


def _fit_trimmed(inputs: Inputs, values: Values, space: Workspace) -> Step:
    """Without the smallest elements and, where there is a gamma, without the largest."""
    from rlhf_merge.methods.arithmetic import (
        kept_count,
        share_count,
        sum_task_vectors,
        task_vector_magnitudes,
        trim,
    )

    wanted: list[list[int]] = []
    for own in values.per_model:
        kept = kept_count(own["density"], inputs.numel)
        dropped = min(share_count(own.get("gamma", 0.0), inputs.numel), inputs.numel - kept)
        bounds = [kept + dropped, dropped + 1] if "gamma" in own else [kept]
        wanted.append(bounds if kept < inputs.numel else [])
    found = task_vector_magnitudes(inputs, space, wanted)
    return sum_task_vectors(inputs, values, [trim(*bounds) if bounds else None for bounds in found])


def _fit_random(inputs: Inputs, values: Values, space: Workspace) -> Step:
    """With elements dropped at random; where there is an epsilon, small ones of a row more often."""
    from rlhf_merge.methods.arithmetic import MaskBits, random_drop, rank_drop, sum_task_vectors

    row, rescale = inputs.shape[-1] if inputs.shape else 1, bool(values.shared["rescale"])
    drops: list[Sparsify | None] = []
    for index, own in enumerate(values.per_model):
        bits, density = MaskBits(inputs.seed, inputs.name, index), own["density"]
        if density == 1:
            drops.append(None)
        elif "epsilon" in own:
            drops.append(rank_drop(bits, density, own["epsilon"], rescale, row))
        else:
            drops.append(random_drop(bits, density, rescale))
    row_wise = any("epsilon" in own for own in values.per_model)
    return sum_task_vectors(inputs, values, drops, row_length=max(1, row) if row_wise else 1)


PARAMETERS = {
    "epsilon": Parameter(
        0.15, "half the spread of the probabilities to keep an element", 0.0, 0.5, per_model=True
    ),
    "gamma": Parameter(
        0.01, "share of a task vector's largest elements that is dropped", 0.0, 1.0, per_model=True
    ),
}
_TASK: dict[str, Scalar] = {"weight": 1.0, "lambda": 1.0, "normalize": False}
_SIGNED: dict[str, Scalar] = {**_TASK, "sign": "mass"}
_DARE: dict[str, Scalar] = {"density": 1.0, "rescale": True}
_DELLA: dict[str, Scalar] = {"density": 1.0, "epsilon": 0.15, "rescale": True}
_CRUMBS: dict[str, Scalar] = {"density": 0.9, "gamma": 0.01}


def _trimmed(title: str, summary: str, parameters: dict[str, Scalar], **more: Any) -> Method:
    return Method(title, summary, parameters, _fit_trimmed, ranks=True, buffers=4, **more)


def _random(title: str, summary: str, parameters: dict[str, Scalar], **more: Any) -> Method:
    return Method(title, summary, parameters, _fit_random, **more)


_BY_RANK: dict[str, Any] = {"paper": "arXiv:2406.11617", "buffers": 16, "row_wise": True}
_WITHOUT_ENDS: dict[str, Any] = {"paper": "arXiv:2312.06795", "mergekit_defaults": {"density": 1.0}}

METHODS = {
    "task_arithmetic": Method(
        "Task arithmetic", "base plus the weighted task vectors", _TASK, _fit_whole, paper="arXiv:2212.04089"
    ),
    "ties": _trimmed(
        "TIES",
        "trim the task vectors, elect signs, average what agrees",
        {**_SIGNED, "density": 1.0, "normalize": True},
        paper="arXiv:2306.01708",
    ),
    "dare_linear": _random(
        "DARE",
        "drop elements of the task vectors at random, rescale the rest, add",
        {**_TASK, **_DARE},
        paper="arXiv:2311.03099",
    ),
    "dare_ties": _random(
        "DARE-TIES",
        "drop at random and rescale, then elect signs as TIES does",
        {**_SIGNED, **_DARE},
        paper="arXiv:2311.03099",
    ),
    "della_linear": _random(
        "DELLA, linear",
        "drop small elements of each row more often than large ones, rescale, add",
        {**_TASK, **_DELLA},
        **_BY_RANK,
    ),
    "della": _random(
        "DELLA",
        "drop small elements of each row more often than large ones, rescale, elect signs",
        {**_SIGNED, **_DELLA, "normalize": True},
        **_BY_RANK,
    ),
    "breadcrumbs": _trimmed(
        "Model Breadcrumbs",
        "drop the largest and the smallest elements of the task vectors, add",
        {**_TASK, **_CRUMBS},
        **_WITHOUT_ENDS,
    ),
    "breadcrumbs_ties": _trimmed(
        "Model Breadcrumbs with TIES",
        "drop the largest and the smallest elements, then elect signs as TIES does",
        {**_SIGNED, **_CRUMBS},
        **_WITHOUT_ENDS,
    ),
}
