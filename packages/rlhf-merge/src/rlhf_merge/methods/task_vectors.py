"""What the task vectors τ = θ - θ₀ of models have to do with each other, as sums over the elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_merge.methods.blocks import Inputs, Workspace
from rlhf_merge.methods.combine import task_vector_magnitudes
from rlhf_merge.methods.sparsify import kept_count

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Measures:
    """Sums and counts over the elements of some tensors, for a base and n models.

    Signs are those of the task vectors or, where a density was asked for, of the trimmed ones.

    Args:
        elements: number of elements.
        base_square: Σ θ₀².
        products: Σ τᵢ τⱼ, (n, n).
        changed: elements of each model that differ from the base's, (n,).
        same_in_bf16: elements of each model that, rounded to bfloat16, equal the base's, (n,).
        shared: elements where both of two models have a sign, (n, n); on the diagonal, where one has.
        opposed: elements where two models have opposite signs, (n, n).
        any_shared: elements where at least two models have a sign.
        any_opposed: elements where at least two models have opposite signs.
    """

    elements: int
    base_square: float
    products: NDArray[np.float64]
    changed: Counts
    same_in_bf16: Counts
    shared: Counts
    opposed: Counts
    any_shared: int
    any_opposed: int

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
        if norm == 0:
            return 0.0
        return norm / math.sqrt(self.base_square) if self.base_square else math.inf

    def rms(self, model: int) -> float | None:
        """√(‖τ‖²/elements), the size of a typical change."""
        return math.sqrt(self.products[model, model] / self.elements) if self.elements else None

    def share_changed(self, model: int) -> float | None:
        """Share of the elements that differ from the base's."""
        return _share(self.changed[model], self.elements)

    def share_same_in_bf16(self, model: int) -> float | None:
        """Share of the elements that equal the base's once both are rounded to bfloat16."""
        return _share(self.same_in_bf16[model], self.elements)

    def cosine(self, one: int, other: int) -> float | None:
        """Cosine of the angle between two whole task vectors; None where one of them is zero."""
        norms = math.sqrt(self.products[one, one]) * math.sqrt(self.products[other, other])
        return max(-1.0, min(1.0, self.products[one, other] / norms)) if norms else None

    @property
    def lowest_cosine(self) -> float | None:
        """The lowest cosine of two of the task vectors that are not zero."""
        pairs = [(one, other) for one in range(len(self.changed)) for other in range(one)]
        return min((found for pair in pairs if (found := self.cosine(*pair)) is not None), default=None)

    def conflict(self, one: int, other: int) -> float | None:
        """Share of the elements where the two have opposite signs."""
        return _share(self.opposed[one, other], self.elements)

    def conflict_of_shared(self, one: int, other: int) -> float | None:
        """The same, of the elements where both have a sign; about ½ for unrelated task vectors."""
        return _share(self.opposed[one, other], self.shared[one, other])

    @property
    def any_conflict(self) -> float | None:
        """Share of the elements where any two models have opposite signs."""
        return _share(self.any_opposed, self.elements)

    @property
    def any_conflict_of_shared(self) -> float | None:
        """The same, of the elements where at least two have a sign."""
        return _share(self.any_opposed, self.any_shared)


def measure(inputs: Inputs, space: Workspace, density: float | None = None) -> Measures:
    """Measure the task vectors of one tensor, block by block.

    Args:
        inputs: of the tensor; they have a base.
        space: buffers on the CPU.
        density: share of the largest magnitudes of every task vector whose signs are compared, as TIES
            trims them (arXiv:2306.01708, section 4.1); None compares all.

    Raises:
        MergeError: an input holds NaN or an infinity.
    """
    thresholds = _thresholds(inputs, space, density)
    count = len(inputs.models)
    total = Measures.total((), count)
    for start, stop in inputs.ranges():
        base = inputs.read_base(start, stop, space.take("base", stop - start))
        rows = space.take_rows("rows", count, stop - start)
        same = [_subtract(inputs, index, start, stop, base, rows[index]) for index in range(count)]
        changed = np.array([np.count_nonzero(row.numpy() != 0) for row in rows])
        shared, opposed, any_shared, any_opposed = _compare_signs(rows.numpy(), thresholds)
        total += Measures(
            elements=stop - start,
            base_square=float(_products(base[None])[0, 0]),
            products=_products(rows),
            changed=changed,
            same_in_bf16=np.array(
                [stop - start - n if found is None else found for found, n in zip(same, changed, strict=True)]
            ),
            shared=shared,
            opposed=opposed,
            any_shared=any_shared,
            any_opposed=any_opposed,
        )
    return total


def passes(dtype: torch.dtype, density: float | None) -> int:
    """How often `measure` reads its inputs."""
    return 1 if density is None or density == 1 else 1 + dtype.itemsize // 2


def _thresholds(inputs: Inputs, space: Workspace, density: float | None) -> list[float]:
    """The least magnitude of each task vector whose sign counts; never 0, which has none."""
    smallest = torch.finfo(space.dtype).smallest_normal * torch.finfo(space.dtype).eps  # a subnormal number
    kept = inputs.numel if density is None else kept_count(density, inputs.numel)
    wanted = [[kept] if kept < inputs.numel else [] for _ in inputs.models]
    found = task_vector_magnitudes(inputs, space, wanted)
    return [max([smallest, *low]) for low in found]


def _subtract(inputs: Inputs, index: int, start: int, stop: int, base: Tensor, row: Tensor) -> int | None:
    """Read a block of a task vector; the number of elements that bfloat16 does not tell from the base's.

    None where both are bfloat16 on disk: then these are the elements that are equal.
    """
    inputs.read_model(index, start, stop, row)
    assert inputs.base is not None
    both = {inputs.base.dtype, inputs.models[index].dtype} == {torch.bfloat16}
    same = None if both else int((row.bfloat16() == base.bfloat16()).sum())
    row.sub_(base)
    return same


def _products(rows: Tensor) -> NDArray[np.float64]:
    """Scalar products (n, n) of the rows, also where float32 cannot hold them."""
    products = rows @ rows.T
    if not bool(products.isfinite().all()):
        rows = rows.double()
        products = rows @ rows.T
    return products.double().numpy()


def _compare_signs(rows: NDArray[Any], thresholds: Sequence[float]) -> tuple[Counts, Counts, int, int]:
    """Count shared and opposed signs in a block, of each pair and of any pair.

    Args:
        rows: task vectors, (n, elements).
        thresholds: least magnitudes that count, (n,).
    """
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
