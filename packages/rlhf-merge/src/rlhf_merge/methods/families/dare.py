"""DARE: task vectors with elements dropped at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from rlhf_merge.methods.families.ties import SIGNED, TASK
from rlhf_merge.methods.in_memory import Numbers, Summing, merge_sparse
from rlhf_merge.methods.spec import Method, Values

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.blocks import Inputs, Workspace
    from rlhf_merge.methods.spec import Step


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
    return merge_sparse(("dare_linear", "dare_ties"), base, tensors, given, summing, (seed, name))


def _fit_dare(inputs: Inputs, values: Values, space: Workspace) -> Step:
    """Task vectors with random elements dropped."""
    from rlhf_merge.methods.combine import Elect
    from rlhf_merge.methods.sparsify import MaskBits, RandomDrop

    return Elect(
        inputs,
        values,
        [
            RandomDrop(MaskBits(inputs.seed, inputs.name, index), density, bool(values.shared["rescale"]))
            if density < 1
            else None
            for index, density in enumerate(values.of("density"))
        ],
    )


METHODS = {
    "dare_linear": Method(
        "DARE",
        "drop elements of the task vectors at random, rescale the rest, add",
        {**TASK, "density": 1.0, "rescale": True},
        _fit_dare,
        paper="arXiv:2311.03099",
    ),
    "dare_ties": Method(
        "DARE-TIES",
        "drop at random and rescale, then elect signs as TIES does",
        {**SIGNED, "density": 1.0, "rescale": True},
        _fit_dare,
        paper="arXiv:2311.03099",
    ),
}
