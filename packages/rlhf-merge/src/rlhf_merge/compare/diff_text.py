"""A comparison of models as tables and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rlhf_merge.compare.diff import ModelDifference
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.task_vectors import Measures
from rlhf_merge.report_text import clipped, cosine_text, number_text, plain, share_text, table

_NAME_LENGTHS = {1: 0, 2: 12, 3: 7}
"""Number of models: characters of their names in the head of their columns, so that the table fits into 80
characters. Of more models than this, the table shows only the largest change."""

_CHANGE = "change: norm of the difference, relative to the base's"
_SIGNS = """signs opposed: share of the elements that models change with opposite signs
of shared: the same, of the elements that both change; 50% for unrelated changes"""

_Column = tuple[str, Callable[[Measures], str]]


def render_difference(difference: ModelDifference, *, by: str = "layer") -> RenderableType:
    """A comparison for a terminal: what differs by layer, kind or tensor, then by model and by pair."""
    if by not in ("layer", "kind", "tensor"):
        raise MergeError(f"by must be layer, kind or tensor, got {by!r}", code="invalid_value", key="by")
    rows = {"layer": difference.by_row, "kind": difference.by_kind}.get(by) or {
        tensor.name: tensor.measures for tensor in difference.tensors
    }
    columns = _columns(difference)
    made = table(by, *(header for header, _ in columns), *(["most changed"] if by == "layer" else []))
    for row, measures in rows.items():
        last = [_most_changed_kind(difference, row)] if by == "layer" else []
        if last:  # its blank is not a place to cut it at
            made.columns[-1].min_width = max(len(last[0]), made.columns[-1].min_width or 0)
        made.add_row(Text(row), *(text(measures) for _, text in columns), *last)
    made.add_section()
    made.add_row("all", *(text(difference.total) for _, text in columns), style="bold")
    parts: list[RenderableType] = [made, ""]
    legend = [Text(_CHANGE, "dim")]
    if len(difference.models) > 1:
        parts += [_model_table(difference), "", _pair_table(difference), ""]
        legend.append(Text(_SIGNS, "dim"))
    notes = [f"Note: {note}." for note in difference.notes]
    notes += [
        f"Integers differ: {name} of {model}, in {count} elements."
        for name, counts in difference.integers.items()
        for model, count in zip(difference.names, counts, strict=True)
        if count
    ]
    return Group(*parts, *legend, *map(Text, notes))


def difference_json(difference: ModelDifference) -> dict[str, Any]:
    """A comparison as plain values; what is not finite or does not exist is null."""
    return {
        "base": difference.base,
        "models": list(difference.models),
        "names": list(difference.names),
        "density": difference.density,
        "notes": list(difference.notes),
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


def _columns(difference: ModelDifference) -> list[_Column]:
    """Header and content of the columns of numbers."""
    count = len(difference.models)
    if count == 1:
        return [
            ("change", lambda of: share_text(of.relative_norm(0))),
            ("RMS", lambda of: number_text(of.rms(0))),
            ("changed", lambda of: share_text(of.share_changed(0))),
            ("same\nin bf16", lambda of: share_text(of.share_same_in_bf16(0))),
        ]
    columns: list[_Column] = [
        (
            f"change\n{clipped(name, _NAME_LENGTHS.get(count, 0))}",
            lambda of, model=model: share_text(of.relative_norm(model)),
        )
        for model, name in enumerate(difference.names)
    ]
    if count not in _NAME_LENGTHS:
        columns = [("most\nchange", lambda of: share_text(max(map(of.relative_norm, range(count)))))]
    return [
        *columns,
        ("lowest\ncosine", lambda of: cosine_text(of.lowest_cosine)),
        ("signs\nopposed", lambda of: share_text(of.any_conflict)),
        ("of\nshared", lambda of: share_text(of.any_conflict_of_shared)),
    ]


def _model_table(difference: ModelDifference) -> RenderableType:
    made = table("model", "change", "changed", "same\nin bf16")
    total = difference.total
    for model, name in enumerate(difference.names):
        shares = total.relative_norm(model), total.share_changed(model), total.share_same_in_bf16(model)
        made.add_row(Text(name), *map(share_text, shares))
    return made


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
        kind: max(map(measures.relative_norm, range(len(difference.models))))
        for (place, kind), measures in difference.cells.items()
        if place == row and kind != row and measures.base_square
    }
    kind = max(found, key=lambda kind: found[kind], default="")
    return f"{kind} {share_text(found[kind])}" if found.get(kind) else ""
