"""Methods whose result is a weighted sum of the models, with weights from their lengths and angles.

Lengths and angles are those of whole tensors: one pass sums the Gram matrix, a second adds up the models.
What lies between works on a handful of numbers in float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

LINEAR_COSINE = 0.9995
"""SLERP takes a straight line where the cosine is beyond this, as the implementations of it in use do."""

_EQUAL_COSINE = 1 - 1e-6
"""Directions nearer than this are one for the spherical mean: sums in float32 are not exact, and equal
tensors must merge to themselves to the bit. Taking them as one changes the mean's length by 5e-7 at most."""


def slerp_coefficients(gram: NDArray[np.float64], t: float) -> Vector:
    """How much of two tensors SLERP takes: sin((1-t)θ)/sin θ and sin(tθ)/sin θ.

    Shoemake (1985), Animating rotation with quaternion curves; the lengths of the tensors are left as they
    are. A straight line, 1-t and t, where |cos θ| > 0.9995 or one of them is zero.

    Args:
        gram: (2, 2), the scalar products of the tensors.
        t: in [0, 1], how far to go from the first to the second.
    """
    length = math.sqrt(gram[0, 0] * gram[1, 1])
    cosine = gram[0, 1] / length if length > 0 else 1.0
    if abs(cosine) > LINEAR_COSINE:
        return np.array([1 - t, t])
    angle = math.acos(cosine)
    return np.array([math.sin((1 - t) * angle), math.sin(t * angle)]) / math.sin(angle)


def spherical_mean_coefficients(
    gram: NDArray[np.float64], weights: Vector, max_iter: int, tol: float
) -> Vector:
    """How much of each tensor the Karcher mean of their directions takes, at their mean length.

    The mean m of the unit vectors u_i minimises Σ αᵢ arccos²(m·uᵢ). It is found by the iteration
    m ← cos|τ| m + sin|τ| τ/|τ| with τ = Σ αᵢ θᵢ/sin θᵢ (uᵢ - cos θᵢ m), which never leaves the span of the
    uᵢ, and so needs their scalar products only. Karcher (1977); Nielsen & Bhatia (2013), chapter 1.

    Args:
        gram: (n, n), the scalar products of the tensors; tensors that are zero get the coefficient 0.
        weights: (n,), αᵢ up to a factor, ≥ 0.
        max_iter: most iterations.
        tol: length of a step, in radians, at which the iterations end.
    """
    lengths = np.sqrt(np.diag(gram))
    used = (lengths > 0) & (weights > 0)
    if not used.any():
        return np.zeros(len(weights))
    alphas = weights[used] / weights[used].sum()
    cosines = np.clip(gram[np.ix_(used, used)] / np.outer(lengths[used], lengths[used]), -1, 1)
    cosines[cosines > _EQUAL_COSINE] = 1.0
    mean = _unit(alphas, cosines)
    for _ in range(max_iter):
        along = np.clip(cosines @ mean, -1, 1)
        angles = np.arccos(along)
        pull = alphas * np.where(angles > tol, angles / np.maximum(np.sin(angles), 1e-300), 1.0)
        tangent = pull - (pull @ along) * mean
        step = math.sqrt(max(0.0, tangent @ cosines @ tangent))
        if step < tol:
            break
        mean = _unit(math.cos(step) * mean + math.sin(step) / step * tangent, cosines)
    coefficients = np.zeros(len(weights))
    coefficients[used] = (weights @ lengths / weights.sum()) * mean / lengths[used]
    return coefficients


def model_stock_coefficients(gram: NDArray[np.float64]) -> Vector:
    """How much of each task vector Model Stock adds to the base: t/n with t = n cos θ / (1 + (n-1) cos θ).

    Jang et al. (2024), arXiv:2403.19522, eq. 8; cos θ is the mean cosine between two task vectors. Where it
    is not positive, the vectors point away from each other: t would lead away from them, without bound, and
    the base stays.

    Args:
        gram: (n, n), the scalar products of the n ≥ 2 task vectors.
    """
    count = len(gram)
    lengths = np.sqrt(np.diag(gram))
    products = np.outer(lengths, lengths)
    cosines = np.divide(gram, products, out=np.zeros_like(gram), where=products > 0)
    cosine = float(np.clip(cosines[np.triu_indices(count, 1)], -1, 1).mean())
    t = count * cosine / (1 + (count - 1) * cosine) if cosine > 0 else 0.0
    return np.full(count, t / count)


def _unit(coefficients: Vector, cosines: NDArray[np.float64]) -> Vector:
    """Coefficients of the same direction at length 1; of the first vector where they cancel out."""
    length = math.sqrt(max(0.0, coefficients @ cosines @ coefficients))
    if length < 1e-8:
        return np.eye(len(coefficients))[0]
    return coefficients / length
