"""Weighted sums of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_merge.methods.spec import Method, Numbers, Step, Values, merge

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.blocks import Inputs, Workspace


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
    return merge("linear", None, tensors, {"weight": weights, "normalize": normalize})


def _fit(inputs: Inputs, values: Values, space: Workspace) -> Step:
    import numpy as np

    from rlhf_merge.methods.combine import combine

    weights = np.array(values.of("weight"))
    return combine(inputs, weights / weights.sum() if values.shared.get("normalize") else weights)


METHODS = {
    "linear": Method(
        "Linear (model soup)",
        "weighted mean of the models",
        {"weight": 1.0, "normalize": True},
        _fit,
        base="optional",
        paper="arXiv:2203.05482",
    ),
    "passthrough": Method(
        "Passthrough",
        "layers of the models as they are, one behind the other",
        {"weight": 1.0},
        _fit,
        base="optional",
        models=(1, 1),
        mergekit_names={"scale": "weight"},
    ),
}
