"""Methods that go by the lengths of tensors and the angles between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_merge.methods.spec import Method, Numbers, Parameter, Step, Values, merge

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.blocks import Inputs, Workspace


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
    return merge("slerp", None, [first, second], {"t": t})


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
    return merge("karcher", None, tensors, {"weight": weights, "max_iter": max_iter, "tol": tol})


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
    return merge("model_stock", base, tensors, {})


def _fit_slerp(inputs: Inputs, values: Values, space: Workspace) -> Step:
    from rlhf_merge.methods.combine import combine, gram, slerp_coefficients

    return combine(inputs, slerp_coefficients(gram(inputs, space), float(values.shared["t"])))


def _fit_karcher(inputs: Inputs, values: Values, space: Workspace) -> Step:
    import numpy as np

    from rlhf_merge.methods.combine import combine, gram, spherical_mean_coefficients

    limits = int(values.shared["max_iter"]), float(values.shared["tol"])
    weights = np.array(values.of("weight"))
    return combine(inputs, spherical_mean_coefficients(gram(inputs, space), weights, *limits))


def _fit_model_stock(inputs: Inputs, values: Values, space: Workspace) -> Step:
    from rlhf_merge.methods.combine import combine, gram, model_stock_coefficients

    return combine(inputs, model_stock_coefficients(gram(inputs, space)))


PARAMETERS = {
    "max_iter": Parameter(10, "iterations towards the spherical mean", 1),
    "tol": Parameter(1e-5, "length of the step, in radians, at which the iterations end", 0.0, low_open=True),
}
METHODS = {
    "slerp": Method(
        "SLERP",
        "along the great circle from the first model to the second",
        {"t": 0.5},
        _fit_slerp,
        base="optional",
        models=(2, 2),
        paper="doi:10.1145/325165.325242",
        passes=2,
        from_base=True,
    ),
    "karcher": Method(
        "Spherical mean",
        "SLERP for any number of models: the Karcher mean of their directions",
        {"weight": 1.0, "max_iter": 10, "tol": 1e-5},
        _fit_karcher,
        base="optional",
        paper="arXiv:2603.04972",
        passes=2,
        divides=True,
        mergekit_names={"max_iter": "max_iter", "tol": "tol"},
    ),
    "model_stock": Method(
        "Model Stock",
        "from the base towards the mean of the models, as far as their angles say",
        {},
        _fit_model_stock,
        models=(2, None),
        paper="arXiv:2403.19522",
        passes=2,
    ),
}
