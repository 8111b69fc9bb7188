"""Differences of models from a base and from each other: task vectors and their conflicts by tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from rlhf_merge.compare.kinds import EMBEDDING, Place, ordered_kinds, ordered_rows, place_tensors
from rlhf_merge.compare.measures import Measures, measure, passes
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import Checkpoint, open_checkpoint
from rlhf_merge.methods.blocks import Begin, Inputs, OnBytes, Readable, Spaces, map_tensors, piece
from rlhf_merge.names import is_vocabulary_tensor, missing, vocabulary_rows
from rlhf_merge.run.matching import check_alike, matched
from rlhf_merge.text import number_text, plain, share_text, short_names, table

_Key = TypeVar("_Key", bound=Hashable)

_LEGEND = "change: norm of the difference, relative to the base's"
_LEGEND_OF_SIGNS = """signs opposed: share of the elements that models change with opposite signs
of shared: the same, of the elements that both change; 50% for unrelated changes"""


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
    """What task vectors were trimmed to before their signs were compared; None if they were not."""
    tensors: tuple[TensorDifference, ...]
    integers: Mapping[str, tuple[int, ...]]
    """For each tensor of integers, how many elements of each model differ from the base's."""
    notes: tuple[str, ...]
    """What was compared otherwise than element by element of tensors of one name."""

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
    for name, owner in {name: spec for spec, own in tensors.items() for name in own}.items():
        for spec, own in tensors.items():
            if name not in own:
                raise missing(name, spec, owner)
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


def difference_json(difference: ModelDifference) -> dict[str, Any]:
    """A comparison as plain values; what is not finite or does not exist is null."""
    names = difference.names

    def finite(facts: Mapping[str, float | None]) -> dict[str, Any]:
        return {name: plain(value) for name, value in facts.items()}

    def facts(of: Measures) -> dict[str, Any]:
        pairs = [
            {"models": [names[one], names[other]], **finite(of.of_pair(one, other))}
            for one, other in difference.pairs
        ]
        models = {name: finite(of.of_model(model)) for model, name in enumerate(names)}
        return {"elements": of.elements, "models": models, "pairs": pairs, **finite(of.of_any())}

    tensors = {}
    for tensor in difference.tensors:
        place = {"layer": tensor.place.row, "kind": tensor.place.kind, "shape": list(tensor.shape)}
        tensors[tensor.name] = place | facts(tensor.measures)
    unequal = {name: dict(zip(names, of, strict=True)) for name, of in difference.integers.items()}
    return {
        "base": difference.base,
        "models": list(difference.models),
        "names": list(names),
        "density": difference.density,
        "notes": list(difference.notes),
        "all": facts(difference.total),
        "layers": {row: facts(of) for row, of in difference.by_row.items()},
        "kinds": {kind: facts(of) for kind, of in difference.by_kind.items()},
        "tensors": tensors,
        "unequal_integers": unequal,
    }


def render_difference(difference: ModelDifference, *, by: str = "layer") -> RenderableType:
    """A comparison for a terminal: a table by layer, kind or tensor, and one of the models' pairs."""
    tensors = {tensor.name: tensor.measures for tensor in difference.tensors}
    tables = {"layer": difference.by_row, "kind": difference.by_kind, "tensor": tensors}
    if by not in tables:
        raise MergeError(f"by must be layer, kind or tensor, got {by!r}", code="invalid_value", key="by")
    columns, count = _columns(difference), len(difference.models)
    made = table(by, *columns, *(["most changed"] if by == "layer" else []))
    for column in made.columns[1 : len(columns) + 1] if count > 1 else ():
        column.max_width = 12 if count == 2 else 7  # of a long name, the beginning
    for row, measures in tables[by].items():
        last = [_most_changed_kind(difference, row)] if by == "layer" else []
        if last:  # its blank is not a place to cut it at
            made.columns[-1].min_width = max(len(last[0]), made.columns[-1].min_width or 0)
        made.add_row(Text(row), *(text(measures) for text in columns.values()), *last)
    made.add_section()
    made.add_row("all", *(text(difference.total) for text in columns.values()), style="bold")
    parts: list[RenderableType] = [made, Text(f"\n{_LEGEND}", "dim")]
    lines = [f"Note: {note}." for note in difference.notes]
    for name, counts in difference.integers.items():
        unequal = [pair for pair in zip(difference.names, counts, strict=True) if pair[1]]
        lines += [f"Integers differ: {name} of {model}, in {number} elements." for model, number in unequal]
    if count > 1:
        pairs = table("models", "cosine", "signs\nopposed", "of\nshared")
        for one, other in difference.pairs:
            cosine, *signs = difference.total.of_pair(one, other).values()
            named = Text(f"{difference.names[one]}, {difference.names[other]}")
            pairs.add_row(named, number_text(cosine, "z.3f"), *map(share_text, signs))
        parts = [made, "", pairs, Text(f"\n{_LEGEND}\n{_LEGEND_OF_SIGNS}", "dim")]
        for model, name in enumerate(difference.names):
            *_, changed, same = map(share_text, difference.total.of_model(model).values())
            lines.append(f"{name}: {changed} of the elements changed, {same} are the same in bfloat16.")
    return Group(*parts, *map(Text, lines))


def _columns(difference: ModelDifference) -> dict[str, Callable[[Measures], str]]:
    """The columns of numbers, by their headers."""
    count = len(difference.models)
    if count == 1:
        return {
            "change": lambda of: share_text(of.relative_norm(0)),
            "RMS": lambda of: number_text(of.of_model(0)["rms"]),
            "changed": lambda of: share_text(of.of_model(0)["changed"]),
            "same\nin bf16": lambda of: share_text(of.of_model(0)["same_in_bf16"]),
        }

    def lowest_cosine(of: Measures) -> str:
        cosines = [cosine for pair in difference.pairs if (cosine := of.of_pair(*pair)["cosine"]) is not None]
        return number_text(min(cosines, default=None), "z.3f")

    columns: dict[str, Callable[[Measures], str]] = {
        f"change\n{name}": lambda of, model=model: share_text(of.relative_norm(model))
        for model, name in enumerate(difference.names)
    }
    if count > 3:
        columns = {"most\nchange": lambda of: share_text(max(map(of.relative_norm, range(count))))}
    return columns | {
        "lowest\ncosine": lowest_cosine,
        "signs\nopposed": lambda of: share_text(of.of_any()["sign_conflict"]),
        "of\nshared": lambda of: share_text(of.of_any()["sign_conflict_of_shared"]),
    }


def _most_changed_kind(difference: ModelDifference, row: str) -> str:
    """The kind of a layer's tensors that changed most, and how much."""
    found = {
        kind: max(map(measures.relative_norm, range(len(difference.models))))
        for (place, kind), measures in difference.cells.items()
        if place == row and kind != row and measures.base_square
    }
    kind = max(found, key=lambda kind: found[kind], default="")
    return f"{kind} {share_text(found[kind])}" if found.get(kind) else ""
