"""Differences of models from a base and from each other: task vectors and their conflicts by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_merge.compare.kinds import EMBEDDING, Place, ordered_kinds, ordered_rows, place_tensors
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import Checkpoint, open_checkpoint
from rlhf_merge.methods.arithmetic import kept_count, products, task_vector_magnitudes
from rlhf_merge.methods.blocks import Begin, Inputs, OnBytes, Readable, Spaces, Workspace, map_tensors, piece
from rlhf_merge.names import check_present, is_vocabulary_tensor, vocabulary_rows
from rlhf_merge.run.matching import check_alike, matched
from rlhf_merge.text import short_names

Counts = NDArray[np.int64]
Facts = dict[str, float | None]
"""Ratios of the sums by name; None where there is nothing to divide by."""
_Key = TypeVar("_Key", bound=Hashable)


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


@dataclass(frozen=True)
class TensorDifference:
    """One tensor of numbers with a fraction; `shape` is that of what was compared."""

    name: str
    place: Place
    shape: tuple[int, ...]
    measures: Measures


@dataclass(frozen=True)
class ModelDifference:
    """Models against a base, as the user named them."""

    base: str
    models: tuple[str, ...]
    labels: tuple[str, ...]
    """Short names of the base and the models, no two of them alike."""
    density: float | None
    """Density to which task vectors were trimmed before their signs were compared; None if they were not."""
    tensors: tuple[TensorDifference, ...]
    integers: Mapping[str, tuple[int, ...]]
    """For each tensor of integers, how many elements of each model differ from the base's."""
    notes: tuple[str, ...]
    """Notes on tensors that were not compared element by element under one name."""

    @property
    def names(self) -> tuple[str, ...]:
        """The short names of the models."""
        return self.labels[1:]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of models, by their positions."""
        return list(combinations(range(len(self.models)), 2))

    @cached_property
    def total(self) -> Measures:
        """Of the whole models."""
        return Measures.total((tensor.measures for tensor in self.tensors), len(self.models))

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of the layers' tensors."""
        return ordered_kinds(tensor.place for tensor in self.tensors)

    @cached_property
    def by_row(self) -> dict[str, Measures]:
        """Of every layer, the embedding before and the head behind them."""
        found = self._sum(lambda place: place.row)
        return {row: found[row] for row in ordered_rows(tensor.place for tensor in self.tensors)}

    @cached_property
    def by_kind(self) -> dict[str, Measures]:
        """Of every kind of the layers' tensors, and of the embedding before and the head behind them."""

        def label(place: Place) -> str:
            return place.kind if place.in_layer or place.kind not in self.kinds else f"{place.kind} outside"

        found = self._sum(label)
        places = sorted((tensor.place for tensor in self.tensors), key=lambda place: place.position)
        before = [label(place) for place in places if place.row == EMBEDDING]
        behind = [label(place) for place in places if not place.in_layer]
        return {kind: found[kind] for kind in dict.fromkeys([*before, *self.kinds, *behind])}

    @cached_property
    def cells(self) -> dict[tuple[str, str], Measures]:
        """Of every layer and kind; of what is outside of the layers, the kind is the row."""
        return self._sum(lambda place: (place.row, place.kind))

    def _sum(self, key: Callable[[Place], _Key]) -> dict[_Key, Measures]:
        groups: dict[_Key, list[Measures]] = {}
        for tensor in self.tensors:
            groups.setdefault(key(tensor.place), []).append(tensor.measures)
        return {name: Measures.total(parts, len(self.models)) for name, parts in groups.items()}


def diff_models(
    base: str,
    others: Sequence[str],
    *,
    density: float | None = None,
    threads: int | None = None,
    begin: Begin | None = None,
) -> ModelDifference:
    """Compare models with a base, and their task vectors with each other.

    Buffers are left out. Where vocabularies have different numbers of rows, the first ones, which all models
    have, are compared, and the result says so. With a density, in (0, 1], the signs compared are those of so
    large a share of every task vector's elements, the largest of each tensor.
    """
    if not others:
        raise MergeError("a comparison needs a model beside the base; name one", code="too_few_models")
    if density is not None and (not 0 < density <= 1 or len(others) == 1):
        message = f"density is {density}, expected a share in (0, 1] of task vectors to compare, two or more"
        raise MergeError(message, code="invalid_value", key="density")
    with ExitStack() as stack:
        specs = list(dict.fromkeys([base, *others]))
        checkpoints = {spec: stack.enter_context(open_checkpoint(spec)) for spec in specs}
        tensors, notes = _comparable(checkpoints)
        floating, integers = [], []
        for name in tensors[base]:
            found = [(spec, name, tensors[spec][name]) for spec in (base, *others)]
            check_alike(found)
            first, *models = (tensor for *_, tensor in found)
            inputs = Inputs(name, first, tuple(models), (base, *others))
            (floating if first.dtype.is_floating_point else integers).append(inputs)
        total = sum(inputs.nbytes * passes(inputs.arithmetic, density) for inputs in floating)
        on_bytes = begin(total) if begin else None

        def work(inputs: Inputs, spaces: Spaces, on_read: OnBytes) -> Measures:
            return measure(replace(inputs, on_read=on_read), spaces(inputs.arithmetic), density)

        measures = map_tensors(work, floating, threads=threads, on_bytes=on_bytes)
        places = place_tensors(tensors[base])
        return ModelDifference(
            base,
            tuple(others),
            tuple(short_names([base, *others])),
            density,
            tuple(
                TensorDifference(inputs.name, places[inputs.name], inputs.shape, found)
                for inputs, found in zip(floating, measures, strict=True)
            ),
            {inputs.name: _unequal_integers(inputs) for inputs in integers},
            tuple(notes),
        )


class _FirstRows:
    """The first rows of a tensor; see `Readable`."""

    def __init__(self, tensor: Readable, rows: int):
        self.dtype, self.row_length, self.read = tensor.dtype, tensor.row_length, tensor.read
        self.shape = (rows, *tensor.shape[1:])


def _comparable(checkpoints: Mapping[str, Checkpoint]) -> tuple[dict[str, dict[str, Readable]], list[str]]:
    """The tensors to compare, of the same names and vocabularies in all models, and what was done for it."""
    found = matched(checkpoints)
    tensors = found.tensors
    notes = [
        f"{spec} has no {name}: its embedding, which is its head, is compared in its place"
        for spec, name in found.lent.items()
    ]
    check_present(dict.fromkeys(name for own in tensors.values() for name in own), tensors, tensors)
    known = {spec: rows for spec, own in tensors.items() if (rows := vocabulary_rows(own)) is not None}
    least = min(known.values(), default=0)
    if len(known) == len(tensors) and set(known.values()) != {least}:
        for spec, own in tensors.items():
            vocabulary = [name for name in own if is_vocabulary_tensor(name, own[name].shape, known[spec])]
            own |= {name: _FirstRows(own[name], least) for name in vocabulary}
        counts = ", ".join(f"{count} in {spec}" for spec, count in known.items())
        notes.append(f"the vocabularies have {counts} rows: the first {least} are compared")
    return tensors, notes


def _unequal_integers(inputs: Inputs) -> tuple[int, ...]:
    """For each model, the number of elements that differ from the base's."""
    counts = [0] * len(inputs.models)
    for start, stop in inputs.ranges():
        first = piece(inputs.all[0], start, stop)
        for index, model in enumerate(inputs.models):
            counts[index] += int((piece(model, start, stop) != first).sum())
    return tuple(counts)
