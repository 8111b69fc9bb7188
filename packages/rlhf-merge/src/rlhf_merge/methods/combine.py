"""One tensor of the result from its inputs: passes that gather a method's statistics, then the merge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_merge.methods.blocks import Inputs, Workspace
from rlhf_merge.methods.sparsify import Sparsify, largest_magnitudes
from rlhf_merge.methods.spec import Step, Values

Vector = Matrix = NDArray[np.float64]

_PIECE = 4096
"""Elements whose products are summed in the type of the arithmetic: in float32, sums over a whole block were
found wrong by 7e-6 of themselves, and so by 3e-8, in the same time."""

LINEAR_COSINE = 0.9995
"""SLERP takes a straight line where the cosine is beyond this, as the implementations of it in use do."""

_EQUAL_COSINE = 1 - 1e-6
"""Directions nearer than this are one for the spherical mean: sums in float32 are not exact, and equal
tensors must merge to themselves to the bit. Taking them as one changes the mean's length by 5e-7 at most."""


def combine(inputs: Inputs, coefficients: Sequence[float] | Vector) -> Step:
    """Σ cᵢ xᵢ, or base + Σ cᵢ (xᵢ - base).

    Sums of models are taken as the model with the largest coefficient plus differences to it, so that equal
    models merge to themselves to the bit where the coefficients sum to 1; a coefficient of 0 leaves no
    trace.
    """
    values = tuple(float(value) for value in coefficients)
    used = [index for index, value in enumerate(values) if value]
    origin, total = inputs.base, 1.0
    if origin is None:
        largest = max(used, key=lambda index: abs(values[index]), default=0)
        origin, total = inputs.models[largest], sum(values)
        used = [index for index in used if index != largest]
        total = 1.0 if abs(total - 1) < 1e-12 else total

    def merge(start: int, stop: int, space: Workspace) -> Tensor:
        size = stop - start
        anchor = inputs.read(origin, start, stop, space.take("base", size))
        out = torch.mul(anchor, total, out=space.take("out", size))
        for index in used:
            other = inputs.read(inputs.models[index], start, stop, space.take("model", size))
            out.sub_(torch.sub(anchor, other, out=other), alpha=values[index])
        return out

    return Step(merge, values)


def sum_task_vectors(
    inputs: Inputs, values: Values, sparsify: Sequence[Sparsify | None], row_length: int = 1
) -> Step:
    """θ₀ + λ · merged task vectors, each made sparse where `sparsify` has something for that.

    The inputs have a base. Signs are elected, as TIES does, where the values have a sign, mass or count.
    """
    weights, sign = values.of("weight"), values.shared.get("sign")
    normalize, factor = bool(values.shared["normalize"]), float(values.shared["lambda"])
    coefficients = [factor * weight for weight in weights]
    if normalize and sign is None:
        total = sum(weights)
        factor, coefficients = factor / total, [value / total for value in coefficients]

    def deltas(base: Tensor, start: int, stop: int, space: Workspace) -> Iterator[tuple[float, Tensor]]:
        """Every weight that is not 0, with its sparse and weighted task vector, negated.

        What is subtracted from the base in the end is +0 where models are equal, and leaves a -0 as it is.
        """
        for index, weight in enumerate(weights):
            if not weight:
                continue
            buffer = space.take("model" if sign is None else f"delta {index}", stop - start)
            delta = torch.sub(base, inputs.read(inputs.models[index], start, stop, buffer), out=buffer)
            make_sparse = sparsify[index]
            if make_sparse is not None:
                make_sparse(delta, space)
            yield weight, delta.mul_(weight)

    def merge(start: int, stop: int, space: Workspace) -> Tensor:
        base = inputs.read(inputs.base, start, stop, space.take("base", stop - start))
        change = space.take("out", stop - start).zero_()
        if sign is not None:
            _elect(change, list(deltas(base, start, stop, space)), space, sign == "mass", normalize)
        else:
            for _, delta in deltas(base, start, stop, space):
                change.add_(delta)
        return torch.sub(base, change.mul_(factor), out=change)

    return Step(merge, tuple(coefficients), row_length)


def _elect(
    change: Tensor, deltas: list[tuple[float, Tensor]], space: Workspace, mass: bool, normalize: bool
) -> None:
    """Add up the elements that have the elected sign; where no sign wins, none."""
    scratch = space.take("model", change.numel())
    votes = space.take("votes", change.numel()).zero_()
    for _, delta in deltas:
        votes.add_(delta if mass else torch.sign(delta, out=scratch))
    votes.sign_()
    divisor = space.take("divisor", change.numel()).zero_() if normalize else None
    for weight, delta in deltas:
        agreeing = delta.mul_(votes).relu_()
        change.add_(agreeing)
        if divisor is not None:
            divisor.add_(torch.sign(agreeing, out=scratch), alpha=abs(weight))
    if divisor is not None:
        change.div_(divisor.clamp_(min=torch.finfo(change.dtype).tiny))
    change.mul_(votes)


def gram(inputs: Inputs, space: Workspace) -> Matrix:
    """Scalar products (n, n) of the models or, with a base, of the task vectors, summed in float64."""
    count = len(inputs.models)
    total = np.zeros((count, count))
    for start, stop in inputs.ranges():
        rows = space.take_rows("rows", count, stop - start)
        for row, model in zip(rows, inputs.models, strict=True):
            inputs.read(model, start, stop, row)
        if inputs.base is not None:
            rows.sub_(inputs.read(inputs.base, start, stop, space.take("base", stop - start)))
        total += products(rows)
    return total


def products(rows: Tensor) -> Matrix:
    """Scalar products (n, n) of rows, in float64 where float32 cannot hold them."""
    whole = rows.shape[1] // _PIECE * _PIECE
    pieces = rows[:, :whole].unflatten(1, (-1, _PIECE)).transpose(0, 1)
    rest = rows[:, whole:]
    found = torch.bmm(pieces, pieces.transpose(1, 2)).sum(0, dtype=torch.float64) + (rest @ rest.T)
    return found.numpy() if bool(found.isfinite().all()) else (rows.double() @ rows.double().T).numpy()


def task_vector_magnitudes(
    inputs: Inputs, space: Workspace, ranks: Sequence[Sequence[int]]
) -> list[list[float]]:
    """The k-th largest magnitudes of the task vectors."""

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for start, stop in inputs.ranges():
            base = inputs.read(inputs.base, start, stop, space.take("base", stop - start))
            for index, model in enumerate(inputs.models):
                if ranks[index]:
                    delta = inputs.read(model, start, stop, space.take("model", stop - start))
                    yield index, delta.sub_(base).abs_()

    return largest_magnitudes(blocks, ranks, space.dtype) if any(ranks) else [[] for _ in ranks]


def slerp_coefficients(gram: Matrix, t: float) -> Vector:
    """How much of two tensors SLERP takes: sin((1-t)θ)/sin θ and sin(tθ)/sin θ.

    Shoemake (1985), Animating rotation with quaternion curves; the lengths of the tensors are left as they
    are. A straight line, 1-t and t, where |cos θ| > 0.9995 or one of them is zero. `gram`, (2, 2), are the
    scalar products of the tensors, t in [0, 1] is how far to go from the first to the second.
    """
    length = math.sqrt(gram[0, 0] * gram[1, 1])
    cosine = gram[0, 1] / length if length > 0 else 1.0
    if abs(cosine) > LINEAR_COSINE:
        return np.array([1 - t, t])
    angle = math.acos(cosine)
    return np.array([math.sin((1 - t) * angle), math.sin(t * angle)]) / math.sin(angle)


def spherical_mean_coefficients(gram: Matrix, weights: Vector, max_iter: int, tol: float) -> Vector:
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
    """How much of each task vector Model Stock adds to the base: t/n with t = n cos θ / (1 + (n-1) cos θ).

    Jang et al. (2024), arXiv:2403.19522, eq. 8; cos θ is the mean cosine between two of the n ≥ 2 task
    vectors, whose scalar products are `gram`, (n, n). Where it is not positive, the vectors point away from
    each other: t would lead away from them, without bound, and the base stays.
    """
    count = len(gram)
    lengths = np.sqrt(np.diag(gram))
    scale = np.outer(lengths, lengths)
    cosines = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
    cosine = float(np.clip(cosines[np.triu_indices(count, 1)], -1, 1).mean())
    t = count * cosine / (1 + (count - 1) * cosine) if cosine > 0 else 0.0
    return np.full(count, t / count)
