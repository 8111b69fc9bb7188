"""One tensor of the result from its inputs: passes over them for what a method must know, then one to merge.

A method is fitted to a tensor (`Method.fit`), which gives the step that merges it block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_merge.methods.blocks import Inputs, Workspace
from rlhf_merge.methods.sparsify import Sparsifier, largest_magnitudes
from rlhf_merge.methods.spec import Values

_PIECE = 4096
"""Elements whose products are summed in the type of the arithmetic: in float32, sums over a whole block were
found wrong by 7e-6 of themselves, and so by 3e-8, in the same time."""


class Combine:
    """Σ cᵢ xᵢ, or base + Σ cᵢ (xᵢ - base).

    Sums of models are taken as the model with the largest coefficient plus differences to it, so that equal
    models merge to themselves to the bit where the coefficients sum to 1; a coefficient of 0 leaves no
    trace.

    Args:
        inputs: of the tensor.
        coefficients: one for each model.
    """

    row_length = 1

    def __init__(self, inputs: Inputs, coefficients: Sequence[float]):
        self._inputs, self.coefficients = inputs, tuple(float(value) for value in coefficients)
        self._used = [index for index, value in enumerate(self.coefficients) if value]
        self._anchor = max(self._used, key=lambda index: abs(self.coefficients[index]), default=0)
        self._total = 1.0 if inputs.base is not None else sum(self.coefficients)
        if abs(self._total - 1) < 1e-12:
            self._total = 1.0

    def __call__(self, start: int, stop: int, space: Workspace) -> Tensor:
        """See `Step`."""
        size = stop - start
        anchor = space.take("base", size)
        if self._inputs.base is not None:
            self._inputs.read_base(start, stop, anchor)
        else:
            self._inputs.read_model(self._anchor, start, stop, anchor)
        out = torch.mul(anchor, self._total, out=space.take("out", size))
        for index in self._used:
            if self._inputs.base is None and index == self._anchor:
                continue
            other = self._inputs.read_model(index, start, stop, space.take("model", size))
            out.sub_(torch.sub(anchor, other, out=other), alpha=self.coefficients[index])
        return out


class Elect:
    """base + λ · merged task vectors, each made sparse, and with TIES's election of signs if asked for.

    Args:
        inputs: of the tensor; they have a base.
        values: weight of each model; lambda and normalize; sign (mass or count) where signs are elected.
        sparsifiers: for each model, what makes its task vector sparse, or None.
        row_length: blocks hold whole rows of this length.
    """

    def __init__(
        self, inputs: Inputs, values: Values, sparsifiers: Sequence[Sparsifier | None], row_length: int = 1
    ):
        self._inputs, self._sparsifiers, self.row_length = inputs, sparsifiers, row_length
        self._weights = values.of("weight")
        self._sign = values.shared.get("sign")
        self._normalize = bool(values.shared["normalize"])
        self._factor = float(values.shared["lambda"])
        self.coefficients = tuple(self._factor * weight for weight in self._weights)
        if self._normalize and self._sign is None:
            total = sum(self._weights)
            self._factor /= total
            self.coefficients = tuple(value / total for value in self.coefficients)

    def __call__(self, start: int, stop: int, space: Workspace) -> Tensor:
        """See `Step`."""
        base = self._inputs.read_base(start, stop, space.take("base", stop - start))
        change = space.take("out", stop - start).zero_()
        if self._sign is None:
            for _, delta in self._deltas(base, start, stop, space):
                change.add_(delta)
        else:
            self._elect(change, list(self._deltas(base, start, stop, space)), space)
        return torch.sub(base, change.mul_(self._factor), out=change)

    def _deltas(
        self, base: Tensor, start: int, stop: int, space: Workspace
    ) -> Iterator[tuple[float, Tensor]]:
        """Every weight that is not 0, with its sparse and weighted task vector, negated.

        What is subtracted from the base in the end is +0 where models are equal, and leaves a -0 as it is.
        """
        for index, weight in enumerate(self._weights):
            if not weight:
                continue
            slot = "model" if self._sign is None else f"delta {index}"
            delta = self._inputs.read_model(index, start, stop, space.take(slot, stop - start))
            torch.sub(base, delta, out=delta)
            sparsifier = self._sparsifiers[index]
            if sparsifier is not None:
                sparsifier(delta, space)
            yield weight, delta.mul_(weight)

    def _elect(self, change: Tensor, deltas: list[tuple[float, Tensor]], space: Workspace) -> None:
        """Add up the elements that have the elected sign; where no sign wins, none."""
        scratch = space.take("model", change.numel())
        votes = space.take("votes", change.numel()).zero_()
        for _, delta in deltas:
            votes.add_(delta if self._sign == "mass" else torch.sign(delta, out=scratch))
        votes.sign_()
        divisor = space.take("divisor", change.numel()).zero_() if self._normalize else None
        for weight, delta in deltas:
            agreeing = delta.mul_(votes).relu_()
            change.add_(agreeing)
            if divisor is not None:
                divisor.add_(torch.sign(agreeing, out=scratch), alpha=abs(weight))
        if divisor is not None:
            change.div_(divisor.clamp_(min=torch.finfo(change.dtype).tiny))
        change.mul_(votes)


def gram(inputs: Inputs, space: Workspace) -> NDArray[np.float64]:
    """Scalar products (n, n) of the models or, with a base, of the task vectors, summed in float64."""
    count = len(inputs.models)
    total = np.zeros((count, count))
    for start, stop in inputs.ranges():
        rows = space.take_rows("rows", count, stop - start)
        for index in range(count):
            inputs.read_model(index, start, stop, rows[index])
        if inputs.base is not None:
            rows.sub_(inputs.read_base(start, stop, space.take("base", stop - start)))
        total += _products(rows).cpu().numpy()
    return total


def _products(rows: Tensor) -> Tensor:
    """Scalar products of rows in float64; short sums, added up in it, keep what float32 sums would lose."""
    whole = rows.shape[1] // _PIECE * _PIECE
    pieces = rows[:, :whole].unflatten(1, (-1, _PIECE)).transpose(0, 1)
    rest = rows[:, whole:]
    products = torch.bmm(pieces, pieces.transpose(1, 2)).sum(0, dtype=torch.float64)
    return products + (rest @ rest.T)


def task_vector_magnitudes(
    inputs: Inputs, space: Workspace, ranks: Sequence[Sequence[int]]
) -> list[list[float]]:
    """The k-th largest magnitudes of the task vectors."""

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for start, stop in inputs.ranges():
            base = inputs.read_base(start, stop, space.take("base", stop - start))
            for index, wanted in enumerate(ranks):
                if wanted:
                    delta = inputs.read_model(index, start, stop, space.take("model", stop - start))
                    yield index, delta.sub_(base).abs_()

    return largest_magnitudes(blocks, ranks, space.dtype) if any(ranks) else [[] for _ in ranks]


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
