"""Model Breadcrumbs: task vectors without their largest and smallest elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from rlhf_merge.methods.families.ties import SIGNED, TASK
from rlhf_merge.methods.in_memory import Numbers, Summing, merge_sparse
from rlhf_merge.methods.spec import Method, Parameter, Values

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.blocks import Inputs, Workspace
    from rlhf_merge.methods.spec import Step


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
    return merge_sparse(("breadcrumbs", "breadcrumbs_ties"), base, tensors, given, summing)


def _fit_breadcrumbs(inputs: Inputs, values: Values, space: Workspace) -> Step:
    """Task vectors without their largest and smallest elements."""
    from rlhf_merge.methods.combine import Elect, task_vector_magnitudes
    from rlhf_merge.methods.sparsify import Trim, kept_count, share_count

    wanted: list[list[int]] = []
    for density, gamma in zip(values.of("density"), values.of("gamma"), strict=True):
        kept = kept_count(density, inputs.numel)
        dropped = min(share_count(gamma, inputs.numel), inputs.numel - kept)
        wanted.append([kept + dropped, dropped + 1] if inputs.numel and kept < inputs.numel else [])
    found = task_vector_magnitudes(inputs, space, wanted)
    return Elect(inputs, values, [Trim(*bounds) if bounds else None for bounds in found])


PARAMETERS = {
    "gamma": Parameter(
        0.01, "share of a task vector's largest elements that is dropped", 0.0, 1.0, per_model=True
    ),
}
METHODS = {
    "breadcrumbs": Method(
        "Model Breadcrumbs",
        "drop the largest and the smallest elements of the task vectors, add",
        {**TASK, "density": 0.9, "gamma": 0.01},
        _fit_breadcrumbs,
        paper="arXiv:2312.06795",
        ranks=True,
        buffers=4,
        mergekit_defaults={"density": 1.0},
    ),
    "breadcrumbs_ties": Method(
        "Model Breadcrumbs with TIES",
        "drop the largest and the smallest elements, then elect signs as TIES does",
        {**SIGNED, "density": 0.9, "gamma": 0.01},
        _fit_breadcrumbs,
        paper="arXiv:2312.06795",
        ranks=True,
        buffers=4,
        mergekit_defaults={"density": 1.0},
    ),
}
