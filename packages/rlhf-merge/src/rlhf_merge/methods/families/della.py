"""DELLA: task vectors with elements dropped at random, small ones more often."""

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
    return merge_sparse(("della_linear", "della"), base, tensors, given, signed, (seed, name))


def _fit_della(inputs: Inputs, values: Values, space: Workspace) -> Step:
    """Task vectors with elements dropped at random, small ones more often."""
    from rlhf_merge.methods.combine import Elect
    from rlhf_merge.methods.sparsify import MaskBits, RankDrop, Sparsifier

    row = inputs.shape[-1] if inputs.shape else 1
    drops: list[Sparsifier | None] = []
    for index, own in enumerate(values.per_model):
        bits = MaskBits(inputs.seed, inputs.name, index)
        full = own["density"] == 1
        drops.append(
            None
            if full
            else RankDrop(bits, own["density"], own["epsilon"], bool(values.shared["rescale"]), row)
        )
    return Elect(inputs, values, drops, row_length=max(1, row))


PARAMETERS = {
    "epsilon": Parameter(
        0.15, "half the spread of the probabilities to keep an element", 0.0, 0.5, per_model=True
    ),
}
METHODS = {
    "della_linear": Method(
        "DELLA, linear",
        "drop small elements of each row more often than large ones, rescale, add",
        {**TASK, "density": 1.0, "epsilon": 0.15, "rescale": True},
        _fit_della,
        paper="arXiv:2406.11617",
        buffers=16,
        row_wise=True,
    ),
    "della": Method(
        "DELLA",
        "drop small elements of each row more often than large ones, rescale, elect signs",
        {**SIGNED, "density": 1.0, "epsilon": 0.15, "rescale": True, "normalize": True},
        _fit_della,
        paper="arXiv:2406.11617",
        buffers=16,
        row_wise=True,
    ),
}
