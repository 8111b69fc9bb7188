"""Task arithmetic and TIES."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_merge.methods.in_memory import Numbers, Sign, merge
from rlhf_merge.methods.spec import Method, Scalar, Values

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.blocks import Inputs, Workspace
    from rlhf_merge.methods.spec import Step


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
    return merge("task_arithmetic", base, tensors, shared)


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
    return merge("ties", base, tensors, shared)


def _fit_task_arithmetic(inputs: Inputs, values: Values, space: Workspace) -> Step:
    """Task vectors as they are."""
    from rlhf_merge.methods.combine import Elect

    return Elect(inputs, values, [None] * len(inputs.models))


def _fit_ties(inputs: Inputs, values: Values, space: Workspace) -> Step:
    """Task vectors without their smallest elements."""
    from rlhf_merge.methods.combine import Elect, task_vector_magnitudes
    from rlhf_merge.methods.sparsify import Trim, kept_count

    kept = [kept_count(density, inputs.numel) for density in values.of("density")]
    wanted = [[count] if 0 < count < inputs.numel else [] for count in kept]
    found = task_vector_magnitudes(inputs, space, wanted)
    return Elect(inputs, values, [Trim(*low) if low else None for low in found])


TASK: dict[str, Scalar] = {"weight": 1.0, "lambda": 1.0, "normalize": False}
"""The parameters of every sum of task vectors."""
SIGNED: dict[str, Scalar] = {**TASK, "sign": "mass"}
"""The same, where signs are elected."""

METHODS = {
    "task_arithmetic": Method(
        "Task arithmetic",
        "base plus the weighted task vectors",
        TASK,
        _fit_task_arithmetic,
        paper="arXiv:2212.04089",
    ),
    "ties": Method(
        "TIES",
        "trim the task vectors, elect signs, average what agrees",
        {**SIGNED, "density": 1.0, "normalize": True},
        _fit_ties,
        paper="arXiv:2306.01708",
        ranks=True,
        buffers=4,
    ),
}
