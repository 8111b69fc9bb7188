"""Logistic models of which completion is preferred, from the difference of what both are like.

P(chosen is preferred) = σ(w · x), x = features of the chosen completion − features of the rejected one: a
Bradley-Terry model (1952) that has no intercept, so that the order of a pair cannot matter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_MOST_STEPS = 60
_BLOCK = 10_000
"""Pairs that are scored at a time, which bounds memory."""
_MEMORY = 8
"""Pairs of steps and gradients that L-BFGS keeps."""
_TOLERANCE = 3e-4
"""Norm of the gradient, a pair, at which a fit has converged."""


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows of which most columns are 0.

    Attributes:
        rows: (m,) row of each entry, rising.
        columns: (m,) its column.
        values: (m,) its value.
        shape: Numbers of rows and columns.
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    shape: tuple[int, int]

    @cached_property
    def starts(self) -> np.ndarray:
        """(rows + 1,) first entry of each row; at the end, the number of entries."""
        return np.searchsorted(self.rows, np.arange(self.shape[0] + 1))

    def take(self, chosen: np.ndarray) -> SparseRows:
        """Some of the rows, in rising order."""
        starts = self.starts
        lengths = (starts[1:] - starts[:-1])[chosen]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = np.repeat(starts[:-1][chosen], lengths) + within
        rows = np.repeat(np.arange(len(chosen)), lengths)
        # bincount would make integers of this size of others, each time.
        columns = self.columns[at].astype(np.intp)
        return SparseRows(rows, columns, self.values[at], (len(chosen), self.shape[1]))

    def dot(self, weights: np.ndarray) -> np.ndarray:
        """(rows,) product with a vector."""
        products = self.values * weights[self.columns]
        return np.bincount(self.rows, products, minlength=self.shape[0])

    def transposed_dot(self, values: np.ndarray) -> np.ndarray:
        """(columns,) product of the transpose with a vector."""
        return np.bincount(self.columns, self.values * values[self.rows], minlength=self.shape[1])


@dataclass(frozen=True, eq=False)
class Design:
    """Differences of features of n pairs, some in dense columns and some in sparse ones.

    Attributes:
        dense: (n, k) numbers.
        sparse: Further columns; None if there are none.
    """

    dense: np.ndarray
    sparse: SparseRows | None = None

    def __len__(self) -> int:
        return len(self.dense)

    def take(self, chosen: np.ndarray) -> Design:
        """Some of the pairs, in rising order."""
        return Design(self.dense[chosen], None if self.sparse is None else self.sparse.take(chosen))

    def dot(self, weights: np.ndarray) -> np.ndarray:
        """(n,) scores of the pairs."""
        split = self.dense.shape[1]
        scores = self.dense @ weights[:split]
        return scores if self.sparse is None else scores + self.sparse.dot(weights[split:])

    def scores(self, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """(chosen,) scores of some of the pairs, in rising order."""
        parts = [chosen[start : start + _BLOCK] for start in range(0, len(chosen), _BLOCK)]
        return np.concatenate([np.zeros(0), *(self.take(part).dot(weights) for part in parts)])

    def transposed_dot(self, values: np.ndarray) -> np.ndarray:
        """(columns,) product of the transpose with a vector."""
        dense = self.dense.T @ values
        return dense if self.sparse is None else np.append(dense, self.sparse.transposed_dot(values))

    @property
    def penalties(self) -> np.ndarray:
        """(columns,) 1 for a dense column, 10 for a sparse one, of which there are many more."""
        columns = 0 if self.sparse is None else self.sparse.shape[1]
        return np.repeat([1.0, 10.0], [self.dense.shape[1], columns])


def probability_of_chosen(scores: np.ndarray) -> np.ndarray:
    """σ(score), the modelled probability that the chosen completion is preferred."""
    return 0.5 * (1 + np.tanh(scores / 2))


def fit_pairs(design: Design) -> np.ndarray:
    """(columns,) weights that minimise −Σ log σ(w · x) + ½ Σ penalty · w², by L-BFGS.

    Nocedal & Wright 2006, "Numerical optimization", algorithms 7.4 and 7.5, with backtracking line search.
    """
    penalties = design.penalties

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        scores = design.dot(weights)
        value = np.logaddexp(0, -scores).sum() + 0.5 * (penalties * weights**2).sum()
        gradient = penalties * weights - design.transposed_dot(probability_of_chosen(-scores))
        return float(value), gradient

    return _minimise(loss, np.zeros(len(penalties)), _TOLERANCE * max(len(design), 1))


def _minimise(
    loss: Callable[[np.ndarray], tuple[float, np.ndarray]], start: np.ndarray, tolerance: float
) -> np.ndarray:
    at, kept = start, deque[tuple[np.ndarray, np.ndarray]](maxlen=_MEMORY)
    value, gradient = loss(at)
    for _ in range(_MOST_STEPS):
        if math.sqrt(_product(gradient, gradient)) <= tolerance:
            break
        direction = -_scaled(gradient, kept)
        slope = _product(gradient, direction)
        size = 1.0 if kept else 1 / math.sqrt(-slope)
        for _ in range(30):
            new_value, new_gradient = loss(at + size * direction)
            if new_value <= value + 1e-4 * size * slope:
                break
            size /= 2
        else:
            break  # no step lowers the loss any further
        step, change = size * direction, new_gradient - gradient
        if _product(step, change) > 1e-12:
            kept.append((step, change))
        at, value, gradient = at + step, new_value, new_gradient
    return at


def _scaled(gradient: np.ndarray, kept: deque[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The inverse of the Hessian, as far as past steps show it, times the gradient."""
    result, factors = gradient.copy(), []
    for step, change in reversed(kept):
        factor = _product(step, result) / _product(step, change)
        result -= factor * change
        factors.append(factor)
    if kept:
        step, change = kept[-1]
        result *= _product(step, change) / _product(change, change)
    for (step, change), factor in zip(kept, reversed(factors), strict=True):
        result += (factor - _product(change, result) / _product(step, change)) * step
    return result


def _product(first: np.ndarray, second: np.ndarray) -> float:
    """Inner product without BLAS, whose threads cost more than so few numbers do."""
    return float(np.einsum("i,i->", first, second))


def fit_with_errors(features: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights of few features, and their standard errors, with pairs that come in clusters.

    Newton's method with a penalty of ½ Σ w², which is negligible with many pairs and keeps weights
    finite where a feature decides every label. The error is the larger of the model's, √(H⁻¹)ⱼⱼ, and of the
    cluster-robust one, √(H⁻¹ (Σ_g s_g s_gᵀ) H⁻¹)ⱼⱼ · √(G/(G−1)), with s_g the sum of a cluster's scores
    (Liang & Zeger 1986, "Longitudinal data analysis using generalized linear models").

    `features` are (n, k) standardised differences, `clusters` (n,) the number of what each pair belongs to,
    such as its prompt.

    Returns:
        (k,) weights and (k,) standard errors.
    """
    x = np.asarray(features, dtype=float)
    weights, hessian = np.zeros(x.shape[1]), np.eye(x.shape[1])
    for _ in range(50):
        p = probability_of_chosen(x @ weights)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(x.shape[1])
        step = np.clip(np.linalg.solve(hessian, x.T @ (1 - p) - weights), -2, 2)
        weights += step
        if np.abs(step).max(initial=0) < 1e-8:
            break
    scores = x * (1 - probability_of_chosen(x @ weights))[:, None]
    _, cluster = np.unique(clusters, return_inverse=True)
    groups = int(cluster.max(initial=-1)) + 1
    sums = np.stack([np.bincount(cluster, column, minlength=groups) for column in scores.T], axis=1)
    inverse = np.linalg.inv(hessian)
    robust = inverse @ (sums.T @ sums) @ inverse * groups / max(groups - 1, 1)
    return weights, np.sqrt(np.maximum(np.diag(inverse), np.diag(robust)))
