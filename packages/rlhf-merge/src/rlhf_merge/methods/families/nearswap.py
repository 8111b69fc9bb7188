"""NearSwap: elements of a second model where they are near the base's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_merge.methods.spec import Method, Step, Values, merge

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.blocks import Inputs, Workspace


def nearswap(base: Tensor, other: Tensor, t: float = 0.001) -> Tensor:
    """θ₀ + clip(θ₁ - θ₀, -t, t): elements near the base's are taken over, others move by t.

    Args:
        base: θ₀.
        other: θ₁.
        t: farthest an element may move, in [0, 1].

    Raises:
        ValueError: shapes differ, or t is out of range.
    """
    return merge("nearswap", base, [other], {"t": t})


def _fit(inputs: Inputs, values: Values, space: Workspace) -> Step:
    import torch

    reach = float(values.shared["t"])

    def step(start: int, stop: int, space: Workspace) -> Tensor:
        base = inputs.read(inputs.base, start, stop, space.take("base", stop - start))
        other = inputs.read(inputs.models[0], start, stop, space.take("out", stop - start))
        other = torch.sub(base, other, out=other).clamp_(-reach, reach)
        return torch.sub(base, other, out=other)

    return Step(step)


METHODS = {
    "nearswap": Method(
        "NearSwap",
        "elements of the second model where they are near the base's",
        {"t": 0.001},
        _fit,
        models=(1, 1),
        paper="the model card of QuartetAnemoi-70B-t0.0001",
    ),
}
