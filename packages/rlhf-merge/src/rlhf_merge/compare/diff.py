"""How models differ from a base, and from each other: task vectors and their conflicts, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch

from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import Checkpoint, open_checkpoint
from rlhf_merge.methods.blocks import Inputs, Workspace
from rlhf_merge.methods.task_vectors import Measures, measure, passes
from rlhf_merge.methods.threads import OnRead, map_tensors
from rlhf_merge.names.tensor_kinds import EMBEDDING, Place, ordered_kinds, ordered_rows, place_tensors
from rlhf_merge.report_text import short_names
from rlhf_merge.run.matching import check_alike, matched
from rlhf_merge.tensors import Readable
from rlhf_merge.vocab.union import is_vocabulary_tensor, vocabulary_rows

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class TensorDifference:
    """One tensor of numbers with a fraction; `shape` is that of what was compared."""

    name: str
    place: Place
    shape: tuple[int, ...]
    measures: Measures


@dataclass(frozen=True)
class ModelDifference:
    """Models against a base.

    Args:
        base: the base, as the user named it.
        models: the others.
        labels: short names of the base and the models, no two of them alike.
        density: what task vectors were trimmed to before their signs were compared; None if they were not.
        tensors: in the base's order.
        integers: for each tensor of integers, how many elements of each model differ from the base's.
        notes: what was compared otherwise than element by element of tensors of one name.
    """

    base: str
    models: tuple[str, ...]
    labels: tuple[str, ...]
    density: float | None
    tensors: tuple[TensorDifference, ...]
    integers: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The short names of the models."""
        return self.labels[1:]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of models, by their positions."""
        count = len(self.models)
        return [(one, other) for one in range(count) for other in range(one + 1, count)]

    @cached_property
    def total(self) -> Measures:
        """Of the whole models."""
        return Measures.total((tensor.measures for tensor in self.tensors), len(self.models))

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of the layers' tensors."""
        return ordered_kinds(tensor.place for tensor in self.tensors)

    @cached_property
    def layers(self) -> list[str]:
        """The rows that are layers."""
        return ordered_rows(tensor.place for tensor in self.tensors if tensor.place.in_layer)

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
        outside = [tensor.place for tensor in self.tensors if not tensor.place.in_layer]
        outside.sort(key=lambda place: place.position)
        before = [label(place) for place in outside if place.row == EMBEDDING]
        behind = [label(place) for place in outside if place.row != EMBEDDING]
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
    on_total: Callable[[int], None] | None = None,
    on_bytes: OnRead | None = None,
) -> ModelDifference:
    """Compare models with a base, and their task vectors with each other.

    Buffers are left out. Where vocabularies have different numbers of rows, the first ones, which all models
    have, are compared, and the result says so.

    Args:
        base: as `open_checkpoint` takes it.
        others: one model or more.
        density: in (0, 1]; the signs compared are those of so large a share of every task vector's elements,
            the largest of each tensor. None: of all.
        threads: how many tensors at once; None is one for each processor.
        on_total: called once, before anything is read, with the bytes that will be.
        on_bytes: called with the bytes of every block, perhaps from several threads.
    """
    _check(others, density)
    with ExitStack() as stack:
        specs = list(dict.fromkeys([base, *others]))
        checkpoints = {spec: stack.enter_context(open_checkpoint(spec)) for spec in specs}
        tensors, notes = _comparable(checkpoints)
        every = [_inputs(name, [base, *others], tensors) for name in tensors[base]]
        floating = [inputs for inputs in every if inputs.all[0].dtype.is_floating_point]
        integers = [inputs for inputs in every if not inputs.all[0].dtype.is_floating_point]
        if on_total is not None:
            on_total(sum(inputs.nbytes * passes(inputs.arithmetic, density) for inputs in floating))

        def work(inputs: Inputs, space: Workspace, on_read: OnRead) -> Measures:
            return measure(replace(inputs, on_read=on_read), space, density)

        measures = map_tensors(
            work,
            floating,
            size=lambda inputs: inputs.nbytes,
            dtype=lambda inputs: inputs.arithmetic,
            threads=threads,
            on_bytes=on_bytes,
        )
        places = place_tensors(tensors[base])
        return ModelDifference(
            base=base,
            models=tuple(others),
            labels=tuple(short_names([base, *others])),
            density=density,
            tensors=tuple(
                TensorDifference(inputs.name, places[inputs.name], inputs.shape, found)
                for inputs, found in zip(floating, measures, strict=True)
            ),
            integers={inputs.name: _unequal_integers(inputs) for inputs in integers},
            notes=tuple(notes),
        )


def _check(others: Sequence[str], density: float | None) -> None:
    if not others:
        raise MergeError(
            "a comparison needs a model beside the base, got none; name one", code="invalid_value"
        )
    if density is None:
        return
    if not 0 < density <= 1:
        raise MergeError(
            f"density must be in (0, 1], got {density}; leave it out to compare all elements",
            code="invalid_value",
        )
    if len(others) == 1:
        raise MergeError("density compares trimmed signs of task vectors, and there is but one; leave it out")


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
    names = dict.fromkeys(name for own in tensors.values() for name in own)
    for spec, own in tensors.items():
        lacking = next((name for name in names if name not in own), None)
        if lacking is not None:
            other = next(other for other in tensors if lacking in tensors[other])
            raise MergeError(
                f"{spec} lacks tensor {lacking}, which {other} has; compare models with the same tensors",
                code="missing_tensor",
                model=spec,
            )
    rows = {spec: vocabulary_rows(own) for spec, own in tensors.items()}
    known = {spec: count for spec, count in rows.items() if count is not None}
    least = min(known.values(), default=0)
    if len(known) == len(rows) and len(set(known.values())) > 1:
        for spec, own in tensors.items():
            for name, tensor in own.items():
                if is_vocabulary_tensor(name, tensor.shape, known[spec]):
                    own[name] = _FirstRows(tensor, least)
        counts = ", ".join(f"{count} in {spec}" for spec, count in known.items())
        notes.append(
            f"the vocabularies have different numbers of rows ({counts}): the first {least} are compared"
        )
    return tensors, notes


def _inputs(name: str, specs: Sequence[str], tensors: Mapping[str, Mapping[str, Readable]]) -> Inputs:
    """One tensor of all models."""
    found = [(spec, name, tensors[spec][name]) for spec in specs]
    check_alike(found)
    first, *others = (tensor for *_, tensor in found)
    return Inputs(name, first, tuple(others), tuple(specs))


def _unequal_integers(inputs: Inputs) -> tuple[int, ...]:
    """For each model, the number of elements that differ from the base's."""
    assert inputs.base is not None
    counts = [0] * len(inputs.models)
    for start, stop in inputs.ranges():
        first, values = (torch.empty(stop - start, dtype=inputs.base.dtype) for _ in range(2))
        inputs.base.read(start, stop, first)
        for index, model in enumerate(inputs.models):
            model.read(start, stop, values)
            counts[index] += int((values != first).sum())
    return tuple(counts)
