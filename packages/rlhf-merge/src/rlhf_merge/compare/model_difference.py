"""What a comparison of models found, and its sums over layers and kinds of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from rlhf_merge.methods.task_vectors import Measures
from rlhf_merge.names.tensor_kinds import EMBEDDING, Place, ordered_kinds, ordered_rows

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class TensorDifference:
    """One tensor of numbers with a fraction.

    Args:
        name: of the tensor.
        place: its layer and kind.
        shape: of what was compared.
        measures: of its task vectors.
    """

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
        found = self._sum(lambda tensor: tensor.place.row)
        return {row: found[row] for row in ordered_rows(tensor.place for tensor in self.tensors)}

    @cached_property
    def by_kind(self) -> dict[str, Measures]:
        """Of every kind of the layers' tensors, and of the embedding before and the head behind them."""
        places = [tensor.place for tensor in self.tensors]
        kinds = self.kinds

        def label(place: Place) -> str:
            return place.kind if place.in_layer or place.kind not in kinds else f"{place.kind} outside"

        found = self._sum(lambda tensor: label(tensor.place))
        outside = sorted((place for place in places if not place.in_layer), key=lambda place: place.position)
        before = [label(place) for place in outside if place.row == EMBEDDING]
        behind = [label(place) for place in outside if place.row != EMBEDDING]
        return {kind: found[kind] for kind in dict.fromkeys([*before, *kinds, *behind])}

    @cached_property
    def cells(self) -> dict[tuple[str, str], Measures]:
        """Of every layer and kind; of what is outside of the layers, the kind is the row."""
        return self._sum(lambda tensor: (tensor.place.row, tensor.place.kind))

    @cached_property
    def most_changed(self) -> tuple[str, str, int] | None:
        """Layer, kind and model of the largest change relative to the base; None where nothing changed."""
        found = [
            (measures.relative_norm(model), row, kind, model)
            for (row, kind), measures in self.cells.items()
            for model in range(len(self.models))
        ]
        largest = max((one for one in found if 0 < one[0] < math.inf), key=lambda one: one[0], default=None)
        return largest[1:] if largest else None

    def _sum(self, key: Callable[[TensorDifference], _Key]) -> dict[_Key, Measures]:
        groups: dict[_Key, list[Measures]] = {}
        for tensor in self.tensors:
            groups.setdefault(key(tensor), []).append(tensor.measures)
        return {name: Measures.total(parts, len(self.models)) for name, parts in groups.items()}
