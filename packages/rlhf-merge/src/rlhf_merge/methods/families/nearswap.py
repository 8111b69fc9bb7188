"""NearSwap: elements of a second model where they are near the base's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_merge.methods.in_memory import merge
from rlhf_merge.methods.spec import Method, Values

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.blocks import Inputs, Workspace
    from rlhf_merge.methods.spec import Step


def nearswap(base: Tensor, other: Tensor, t: float = 0.001) -> Tensor:
    """θ₀ + clip(θ₁ - θ₀, -t, t): elements near the base's are taken over, others move by t.

    Args:
        base: θ₀.
        other: θ₁.
        t: farthest an element may move, ≥ 0.

    Raises:
        ValueError: shapes differ, or t is negative.
    """
    return merge("nearswap", base, [other], {"t": t})


class NearSwap:
    """base + clip(model - base, -t, t).

    Args:
        inputs: of the tensor: a base and one model.
        reach: t ≥ 0.
    """

    row_length = 1
    coefficients = ()

    def __init__(self, inputs: Inputs, reach: float):
        self._inputs, self._reach = inputs, reach

    def __call__(self, start: int, stop: int, space: Workspace) -> Tensor:
        """See `Step`."""
        import torch

        base = self._inputs.read_base(start, stop, space.take("base", stop - start))
        other = self._inputs.read_model(0, start, stop, space.take("out", stop - start))
        other = torch.sub(base, other, out=other).clamp_(-self._reach, self._reach)
        return torch.sub(base, other, out=other)


def _fit_nearswap(inputs: Inputs, values: Values, space: Workspace) -> Step:
    """See `NearSwap`."""
    return NearSwap(inputs, float(values.shared["t"]))


METHODS = {
    "nearswap": Method(
        "NearSwap",
        "elements of the second model where they are near the base's",
        {"t": 0.001},
        _fit_nearswap,
        models=(1, 1),
        paper="the model card of QuartetAnemoi-70B-t0.0001",
    ),
}
