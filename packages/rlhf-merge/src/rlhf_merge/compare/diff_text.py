"""What a comparison of models says, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_merge.compare.model_difference import ModelDifference
from rlhf_merge.report_text import cosine_text, share_text

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
