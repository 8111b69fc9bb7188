"""What a comparison of models says: a table, sentences, and plain values for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rlhf_merge.compare.diff import ModelDifference
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.task_vectors import Measures
from rlhf_merge.report_text import clipped, cosine_text, number_text, plain, share_text, table

_NAME_LENGTHS = {2: 12, 3: 7}
"""Of so many models, the table has a column each, with so many characters of their names, and fits into 80
characters; of more, it shows the least and the most change."""

_RELATED = 0.1
"""Cosines below this are called none: those of unrelated vectors of a million elements are about 0.001."""


def describe(difference: ModelDifference) -> list[str]:
    """A comparison in sentences: the changes, the conflicts, and what was not compared as usual."""
    return [*_changes(difference), *_conflicts(difference), *_integers(difference), *_notes(difference)]


def _changes(difference: ModelDifference) -> Iterator[str]:
    total, base = difference.total, difference.labels[0]
    for model, name in enumerate(difference.names):
        changed = total.share_changed(model)
        if changed is None:
            continue
        if not changed:
            yield f"{name} equals {base} in every element."
            continue
        norm = share_text(total.relative_norm(model))
        elements = share_text(changed)
        yield f"{name} differs from {base} in {elements} of the elements, by {norm} of the norm of {base}."
        lost = total.lost_in_bf16(model)
        if lost:
            share = share_text(lost / int(total.changed[model]))
            yield f"In bfloat16, {share} of the changed elements of {name} would be equal to those of {base}."
    most = difference.most_changed
    if most is not None:
        row, kind, model = most
        place = row if kind == row else f"layer {row} {kind}"
        norm = share_text(difference.cells[row, kind].relative_norm(model))
        whose = f" of {difference.names[model]}" if len(difference.names) > 1 else ""
        yield f"Largest change: {place}{whose}, by {norm}."


def _conflicts(difference: ModelDifference) -> Iterator[str]:
    total = difference.total
    yield from _cosines(difference)
    shared = sum(int(total.shared[pair]) for pair in difference.pairs)
    if not shared:
        return
    trimmed = (
        f" after trimming to a density of {difference.density}" if difference.density is not None else ""
    )
    yield f"Signs are opposed in {share_text(total.any_conflict)} of the elements{trimmed}."
    opposed = sum(int(total.opposed[pair]) for pair in difference.pairs) / shared
    kept = "keep" if difference.density is not None else "change"
    yield (
        f"Where two models {kept} the same element, their signs are opposed in {share_text(opposed)} of the "
        "cases; those of unrelated changes are in 50%."
    )


def _cosines(difference: ModelDifference) -> Iterator[str]:
    names = difference.names
    found = [
        (cosine, f"{names[one]} and {names[other]}")
        for one, other in difference.pairs
        if (cosine := difference.total.cosine(one, other)) is not None
    ]
    if not found:
        return
    (low, least), (high, most) = min(found), max(found)
    if len(found) == 1:
        yield f"The cosine of the task vectors is {cosine_text(low)}: {_meaning(low)}."
    elif _meaning(low) == _meaning(high):
        reach = f"{cosine_text(low)} ({least}) to {cosine_text(high)} ({most})"
        yield f"The cosines of the task vectors are {reach}: {_meaning(low)}."
    else:
        yield f"The lowest cosine of two task vectors is {cosine_text(low)} ({least}): {_meaning(low)}."
        yield f"The highest is {cosine_text(high)} ({most}): {_meaning(high)}."


def _meaning(cosine: float) -> str:
    if cosine >= 1 - _RELATED:
        return "they are nearly the same"
    if cosine >= _RELATED:
        return "they have something in common"
    if cosine > -_RELATED:
        return "they have little to do with each other, and can be added"
    return "they work against each other, and adding them undoes a part of both"


def _integers(difference: ModelDifference) -> Iterator[str]:
    for name, counts in difference.integers.items():
        for model, count in zip(difference.names, counts, strict=True):
            if count:
                yield f"Integers differ: {name} of {model}, in {count} elements."


def _notes(difference: ModelDifference) -> Iterator[str]:
    for note in difference.notes:
        yield f"Note: {note}."


def render_difference(difference: ModelDifference, *, by: str = "layer") -> RenderableType:
    """A comparison for a terminal: a table, and what it says in words."""
    rows = {
        "layer": lambda: difference.by_row,
        "kind": lambda: difference.by_kind,
        "tensor": lambda: {tensor.name: tensor.measures for tensor in difference.tensors},
    }
    if by not in rows:
        raise MergeError(f"by must be layer, kind or tensor, got {by!r}")
    columns = _columns(difference)
    made = table(by, *(header for header, _ in columns), *(["most changed"] if by == "layer" else []))
    for row, measures in rows[by]().items():
        last = [_most_changed_kind(difference, row)] if by == "layer" else []
        made.add_row(Text(row), *(text(measures) for _, text in columns), *last)
    made.add_section()
    made.add_row("all", *(text(difference.total) for _, text in columns), style="bold")
    pairs = [_pair_table(difference), ""] if len(difference.models) > 2 else []
    return Group(
        made, "", *pairs, Text(_legend(difference), "dim"), "", Text("\n".join(describe(difference)))
    )


def difference_json(difference: ModelDifference) -> dict[str, Any]:
    """A comparison as plain values; what is not finite or does not exist is null."""
    return {
        "base": difference.base,
        "models": list(difference.models),
        "names": list(difference.names),
        "density": difference.density,
        "notes": list(difference.notes),
        "words": describe(difference),
        "all": _plain(difference, difference.total),
        "layers": {row: _plain(difference, measures) for row, measures in difference.by_row.items()},
        "kinds": {kind: _plain(difference, measures) for kind, measures in difference.by_kind.items()},
        "tensors": {
            tensor.name: {
                "layer": tensor.place.row,
                "kind": tensor.place.kind,
                "shape": list(tensor.shape),
                **_plain(difference, tensor.measures),
            }
            for tensor in difference.tensors
        },
        "unequal_integers": {
            name: dict(zip(difference.names, counts, strict=True))
            for name, counts in difference.integers.items()
        },
    }


def _plain(difference: ModelDifference, measures: Measures) -> dict[str, Any]:
    names = difference.names
    return {
        "elements": measures.elements,
        "models": {
            name: {
                "relative_norm": plain(measures.relative_norm(model)),
                "rms": plain(measures.rms(model)),
                "changed": plain(measures.share_changed(model)),
                "same_in_bf16": plain(measures.share_same_in_bf16(model)),
            }
            for model, name in enumerate(names)
        },
        "pairs": [
            {
                "models": [names[one], names[other]],
                "cosine": plain(measures.cosine(one, other)),
                "sign_conflict": plain(measures.conflict(one, other)),
                "sign_conflict_of_shared": plain(measures.conflict_of_shared(one, other)),
            }
            for one, other in difference.pairs
        ],
        "sign_conflict": plain(measures.any_conflict),
        "sign_conflict_of_shared": plain(measures.any_conflict_of_shared),
    }


def _columns(difference: ModelDifference) -> list[tuple[str, Callable[[Measures], str]]]:
    """Header and content of the columns of numbers."""
    models = range(len(difference.models))
    columns: list[tuple[str, Callable[[Measures], str]]]
    if len(models) == 1:
        columns = [
            ("change", lambda of: share_text(of.relative_norm(0))),
            ("RMS", lambda of: number_text(of.rms(0))),
            ("changed", lambda of: share_text(of.share_changed(0))),
        ]
        if difference.total.lost_in_bf16(0):
            columns.append(("same\nin bf16", lambda of: share_text(of.share_same_in_bf16(0))))
        return columns
    columns = [
        (
            f"change\n{clipped(name, _NAME_LENGTHS.get(len(models), 0))}",
            lambda of, model=model: share_text(of.relative_norm(model)),
        )
        for model, name in enumerate(difference.names)
    ]
    if len(models) not in _NAME_LENGTHS:
        columns = [
            (f"{word}\nchange", lambda of, pick=pick: share_text(pick(map(of.relative_norm, models))))
            for word, pick in (("least", min), ("most", max))
        ]
    for word, pick in (("lowest", min), ("highest", max)) if len(models) > 2 else (("", min),):
        columns.append((f"{word}\ncosine", lambda of, pick=pick: cosine_text(_cosine(of, difference, pick))))
    return [
        *columns,
        ("signs\nopposed", lambda of: share_text(of.any_conflict)),
        ("of\nshared", lambda of: share_text(of.any_conflict_of_shared)),
    ]


def _legend(difference: ModelDifference) -> str:
    legend = "change: norm of the difference, relative to the base's"
    if len(difference.models) == 1:
        return f"{legend}; changed: share of the elements"
    return (
        f"{legend}; signs opposed: share of the elements where changes have opposite signs; of shared: the "
        "same, of the elements that two models change"
    )


def _cosine(
    measures: Measures, difference: ModelDifference, pick: Callable[[Iterable[float]], float]
) -> float | None:
    found = [measures.cosine(*pair) for pair in difference.pairs]
    known = [cosine for cosine in found if cosine is not None]
    return pick(known) if known else None


def _pair_table(difference: ModelDifference) -> RenderableType:
    made = table("models", "cosine", "signs\nopposed", "of\nshared")
    for one, other in difference.pairs:
        made.add_row(
            Text(f"{difference.names[one]}, {difference.names[other]}"),
            cosine_text(difference.total.cosine(one, other)),
            share_text(difference.total.conflict(one, other)),
            share_text(difference.total.conflict_of_shared(one, other)),
        )
    return made


def _most_changed_kind(difference: ModelDifference, row: str) -> str:
    """The kind of a layer's tensors that changed most, and how much."""
    found = {
        kind: max(measures.relative_norm(model) for model in range(len(difference.models)))
        for (place, kind), measures in difference.cells.items()
        if place == row and kind != row and measures.base_square
    }
    kind = max(found, key=lambda kind: found[kind], default="")
    return f"{kind} {share_text(found[kind])}" if found.get(kind) else ""
