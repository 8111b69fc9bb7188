"""A single model passed through, and means of models: weighted sums, and means by angles between tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlhf_merge.methods.spec import Method, Numbers, Parameter, Step, Values, merge

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.arithmetic import Matrix, Vector
    from rlhf_merge.methods.blocks import Inputs, Workspace
    from rlhf_merge.methods.spec import Fit

_LINEAR_COSINE = 0.9995
"""SLERP takes a straight line where the cosine is beyond this, as the implementations of it in use do."""

_EQUAL_COSINE = 1 - 1e-6
"""Directions nearer than this are one for the spherical mean: sums in float32 are not exact, and equal
tensors must merge to themselves to the bit. Taking them as one changes the mean's length by 5e-7 at most."""


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


def _fit_linear(inputs: Inputs, values: Values, space: Workspace) -> Step:
    import numpy as np

    from rlhf_merge.methods.arithmetic import combine

    weights = np.array(values.of("weight"))
    return combine(inputs, weights / weights.sum() if values.shared.get("normalize") else weights)


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


def _fit_by_angles(coefficients: Callable[[Matrix, Values], Vector]) -> Fit:
    """A combination whose coefficients follow from the tensors' scalar products."""

    def fit(inputs: Inputs, values: Values, space: Workspace) -> Step:
        from rlhf_merge.methods.arithmetic import combine, gram

        return combine(inputs, coefficients(gram(inputs, space), values))

    return fit


def slerp_coefficients(gram: Matrix, t: float) -> Vector:
    """SLERP's coefficients of two tensors: sin((1-t)θ)/sin θ and sin(tθ)/sin θ.

    Shoemake (1985), Animating rotation with quaternion curves; the lengths of the tensors are left as they
    are. A straight line, 1-t and t, where |cos θ| > 0.9995 or one of them is zero. `gram`, (2, 2), are the
    scalar products of the tensors, t in [0, 1] is how far to go from the first to the second.
    """
    import numpy as np

    length = math.sqrt(gram[0, 0] * gram[1, 1])
    cosine = gram[0, 1] / length if length > 0 else 1.0
    if abs(cosine) > _LINEAR_COSINE:
        return np.array([1 - t, t])
    angle = math.acos(cosine)
    return np.array([math.sin((1 - t) * angle), math.sin(t * angle)]) / math.sin(angle)


def spherical_mean_coefficients(
    gram: Matrix, weights: Sequence[float] | Vector, max_iter: int, tol: float
) -> Vector:
    """Coefficient of each tensor in the Karcher mean of their directions, at their mean length.

    The mean m of the unit vectors u_i minimises Σ αᵢ arccos²(m·uᵢ). It is found by the iteration
    m ← cos|τ| m + sin|τ| τ/|τ| with τ = Σ αᵢ θᵢ/sin θᵢ (uᵢ - cos θᵢ m), which never leaves the span of the
    uᵢ, and so needs their scalar products only. Karcher (1977); Nielsen & Bhatia (2013), chapter 1.

    Args:
        gram: (n, n), the scalar products of the tensors; tensors that are zero get the coefficient 0.
        weights: (n,), αᵢ up to a factor, ≥ 0.
        max_iter: most iterations.
        tol: length of a step, in radians, at which the iterations end.
    """
    import numpy as np

    lengths, weights = np.sqrt(np.diag(gram)), np.asarray(weights)
    used = (lengths > 0) & (weights > 0)
    coefficients = np.zeros(len(weights))
    if not used.any():
        return coefficients
    alphas = weights[used] / weights[used].sum()
    cosines = np.clip(gram[np.ix_(used, used)] / np.outer(lengths[used], lengths[used]), -1, 1)
    cosines[cosines > _EQUAL_COSINE] = 1.0

    def unit(vector: Vector) -> Vector:
        """Coefficients of the same direction at length 1; of the first vector where they cancel out."""
        length = math.sqrt(max(0.0, vector @ cosines @ vector))
        return vector / length if length >= 1e-8 else np.eye(len(vector))[0]

    mean = unit(alphas)
    for _ in range(max_iter):
        along = np.clip(cosines @ mean, -1, 1)
        angles = np.arccos(along)
        pull = alphas * np.where(angles > tol, angles / np.maximum(np.sin(angles), 1e-300), 1.0)
        tangent = pull - (pull @ along) * mean
        step = math.sqrt(max(0.0, tangent @ cosines @ tangent))
        if step < tol:
            break
        mean = unit(math.cos(step) * mean + math.sin(step) / step * tangent)
    coefficients[used] = (weights @ lengths / weights.sum()) * mean / lengths[used]
    return coefficients


def model_stock_coefficients(gram: Matrix) -> Vector:
    """Model Stock's coefficient of each task vector: t/n with t = n cos θ / (1 + (n-1) cos θ).

    Jang et al. (2024), arXiv:2403.19522, eq. 8; cos θ is the mean cosine between two of the n ≥ 2 task
    vectors, whose scalar products are `gram`, (n, n). Where it is not positive, the vectors point away from
    each other: t would lead away from them, without bound, and the base stays.
    """
    import numpy as np

    count = len(gram)
    lengths = np.sqrt(np.diag(gram))
    scale = np.outer(lengths, lengths)
    cosines = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
    cosine = float(np.clip(cosines[np.triu_indices(count, 1)], -1, 1).mean())
    t = count * cosine / (1 + (count - 1) * cosine) if cosine > 0 else 0.0
    return np.full(count, t / count)


PARAMETERS = {
    "max_iter": Parameter(10, "iterations towards the spherical mean", 1),
    "tol": Parameter(1e-5, "length of the step, in radians, at which the iterations end", 0.0, low_open=True),
}
METHODS = {
    "linear": Method(
        "Linear (model soup)",
        "weighted mean of the models",
        {"weight": 1.0, "normalize": True},
        _fit_linear,
        base="optional",
        paper="arXiv:2203.05482",
    ),
    "passthrough": Method(
        "Passthrough",
        "layers of the models as they are, one after the other",
        {"weight": 1.0},
        _fit_linear,
        base="optional",
        models=(1, 1),
        mergekit_names={"scale": "weight"},
    ),
    "slerp": Method(
        "SLERP",
        "along the great circle from the first model to the second",
        {"t": 0.5},
        _fit_by_angles(lambda gram, values: slerp_coefficients(gram, float(values.shared["t"]))),
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
        _fit_by_angles(
            lambda gram, values: spherical_mean_coefficients(
                gram, values.of("weight"), int(values.shared["max_iter"]), float(values.shared["tol"])
            )
        ),
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
        _fit_by_angles(lambda gram, values: model_stock_coefficients(gram)),
        models=(2, None),
        paper="arXiv:2403.19522",
        passes=2,
    ),
}
