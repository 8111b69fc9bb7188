"""Similarity and conflicts of task vectors τ = θ - θ₀, as sums over the elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_merge.methods.blocks import Inputs, Workspace
from rlhf_merge.methods.combine import products, task_vector_magnitudes
from rlhf_merge.methods.sparsify import kept_count

Counts = NDArray[np.int64]
Facts = dict[str, float | None]
"""Ratios of the sums by name; None where there is nothing to divide by."""


@dataclass(frozen=True)
class Measures:
    """Sums and counts over the elements of some tensors, for a base and n models.

    Signs are those of the task vectors or, with a density, of the trimmed ones.
    """

    elements: int
    base_square: float  # Σ θ₀²
    products: NDArray[np.float64]  # Σ τᵢ τⱼ, (n, n)
    changed: Counts  # elements of each model that differ from the base's, (n,)
    same_in_bf16: Counts  # elements of each model that, rounded to bfloat16, equal the base's, (n,)
    shared: Counts  # elements where both of two models have a sign, (n, n); on the diagonal, where one has
    opposed: Counts  # elements where two models have opposite signs, (n, n)
    any_shared: int  # elements where at least two models have a sign
    any_opposed: int  # elements where at least two models have opposite signs

    @classmethod
    def total(cls, parts: Iterable[Measures], count: int) -> Measures:
        """The measures of several tensors together, for n = `count` models."""
        none, pairs = np.zeros(count, dtype=np.int64), np.zeros((count, count), dtype=np.int64)
        return sum(parts, cls(0, 0.0, np.zeros((count, count)), none, none, pairs, pairs, 0, 0))

    def __add__(self, other: Measures) -> Measures:
        return Measures(*(getattr(self, own.name) + getattr(other, own.name) for own in fields(self)))

    def relative_norm(self, model: int) -> float:
        """‖τ‖/‖θ₀‖; 0 where nothing changed, infinite where only the base is zero."""
        norm = math.sqrt(self.products[model, model])
        return norm and (norm / math.sqrt(self.base_square) if self.base_square else math.inf)

    def of_model(self, model: int) -> Facts:
        """The relative norm, √(‖τ‖²/elements), and shares of the elements of one model."""
        square = _share(self.products[model, model], self.elements)
        return {
            "relative_norm": self.relative_norm(model),
            "rms": None if square is None else math.sqrt(square),
            "changed": _share(self.changed[model], self.elements),
            "same_in_bf16": _share(self.same_in_bf16[model], self.elements),
        }

    def of_pair(self, one: int, other: int) -> Facts:
        """The cosine of two whole task vectors, None where one is zero, and their opposite signs."""
        norms = math.sqrt(self.products[one, one]) * math.sqrt(self.products[other, other])
        cosine = max(-1.0, min(1.0, self.products[one, other] / norms)) if norms else None
        return {"cosine": cosine} | self._conflict(self.opposed[one, other], self.shared[one, other])

    def of_any(self) -> Facts:
        """The elements where any two models have opposite signs."""
        return self._conflict(self.any_opposed, self.any_shared)

    def _conflict(self, opposed: float, shared: float) -> Facts:
        """Share of all elements, and of those where two have a sign: about ½ for unrelated task vectors."""
        shares = _share(opposed, self.elements), _share(opposed, shared)
        return dict(zip(("sign_conflict", "sign_conflict_of_shared"), shares, strict=True))


def passes(dtype: torch.dtype, density: float | None) -> int:
    """How often `measure` reads its inputs."""
    return 1 if density is None or density == 1 else 1 + dtype.itemsize // 2


def measure(inputs: Inputs, space: Workspace, density: float | None = None) -> Measures:
    """Measure the task vectors of one tensor, block by block.

    With a density, the signs compared are those of so large a share of the largest magnitudes of every task
    vector, as TIES trims them (arXiv:2306.01708, section 4.1).
    """
    # The least magnitude of each task vector whose sign counts; never 0, which has none.
    subnormal = torch.finfo(space.dtype).smallest_normal * torch.finfo(space.dtype).eps
    kept = inputs.numel if density is None else kept_count(density, inputs.numel)
    wanted = [[kept] if kept < inputs.numel else [] for _ in inputs.models]
    thresholds = [max([subnormal, *low]) for low in task_vector_magnitudes(inputs, space, wanted)]
    count, dtypes = len(inputs.models), [tensor.dtype for tensor in inputs.all]
    total = Measures.total((), count)
    for start, stop in inputs.ranges():
        base = inputs.read(inputs.base, start, stop, space.take("base", stop - start))
        rows = space.take_rows("rows", count, stop - start)
        changed, same = np.zeros((2, count), dtype=np.int64)
        for index, (row, model) in enumerate(zip(rows, inputs.models, strict=True)):
            inputs.read(model, start, stop, row)
            narrow = {dtypes[0], model.dtype} == {torch.bfloat16}  # equal ones are those that are not changed
            same[index] = 0 if narrow else int((row.bfloat16() == base.bfloat16()).sum())
            changed[index] = np.count_nonzero(row.sub_(base).numpy())
            same[index] = stop - start - changed[index] if narrow else same[index]
        signs = _compare_signs(rows.numpy(), thresholds)
        square = float(products(base[None])[0, 0])
        total += Measures(stop - start, square, products(rows), changed, same, *signs)
    return total


def _compare_signs(rows: NDArray[Any], thresholds: Sequence[float]) -> tuple[Counts, Counts, int, int]:
    """Count shared and opposed signs of task vectors, (n, elements), of each pair and of any pair."""
    count = len(rows)
    shared, opposed = np.zeros((2, count, count), dtype=np.int64)
    negative = [row <= -low for row, low in zip(rows, thresholds, strict=True)]
    signed = [(row >= low) | minus for row, low, minus in zip(rows, thresholds, negative, strict=True)]
    one = np.zeros(rows.shape[1], dtype=bool)  # where a model has had a sign
    two, against = one.copy(), one.copy()  # where two have, and opposite ones
    for i in range(count):
        for j in range(i):
            both = signed[i] & signed[j]
            unlike = both & (negative[i] ^ negative[j])
            shared[i, j] = shared[j, i] = np.count_nonzero(both)
            opposed[i, j] = opposed[j, i] = np.count_nonzero(unlike)
            against |= unlike
        shared[i, i] = np.count_nonzero(signed[i])
        two |= one & signed[i]
        one |= signed[i]
    return shared, opposed, int(np.count_nonzero(two)), int(np.count_nonzero(against))


def _share(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None
