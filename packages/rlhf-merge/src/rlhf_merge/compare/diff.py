"""How models differ from a base, and from each other: task vectors and their conflicts, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from rlhf_merge.compare.diff_text import describe
from rlhf_merge.compare.model_difference import ModelDifference, TensorDifference
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import Checkpoint, open_checkpoint
from rlhf_merge.methods.blocks import Inputs, Workspace, working_dtype
from rlhf_merge.methods.task_vectors import Measures, measure, passes
from rlhf_merge.methods.threads import OnRead, map_tensors
from rlhf_merge.names.tensor_kinds import place_tensors
from rlhf_merge.names.tensor_names import Tensors
from rlhf_merge.report_text import clipped, cosine_text, number_text, plain, share_text, short_names, table
from rlhf_merge.run.matching import matched
from rlhf_merge.tensors import Readable
from rlhf_merge.vocab.union import is_vocabulary_tensor, vocabulary_rows

_NAME_LENGTHS = {2: 12, 3: 7}
"""Of so many models, the table has a column each, with so many characters of their names, and fits into 80
characters; of more, it shows the least and the most change."""


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

    Buffers are left out.  Where vocabularies have different numbers of rows, the first ones, which all models
    have, are compared, and the result says so.

    Args:
        base: as `open_checkpoint` takes it.
        others: one model or more.
        density: in (0, 1]; the signs compared are those of so large a share of every task vector's elements,
            the largest of each tensor.  None: of all.
        threads: how many tensors at once; None is one for each processor.
        on_total: told once, before anything is read, of the bytes that will be.
        on_bytes: told of the bytes of every block; may be called from several threads.
    """
    _check(others, density)
    with ExitStack() as stack:
        specs = list(dict.fromkeys([base, *others]))
        checkpoints = {spec: stack.enter_context(open_checkpoint(spec)) for spec in specs}
        tensors, notes = _comparable(checkpoints)
        pairs = [_inputs(name, base, others, tensors) for name in tensors[base]]
        floating = [inputs for inputs in pairs if inputs.all[0].dtype.is_floating_point]
        integers = [inputs for inputs in pairs if not inputs.all[0].dtype.is_floating_point]
        if on_total is not None:
            on_total(sum(_nbytes(inputs) * passes(_arithmetic(inputs), density) for inputs in floating))

        def work(inputs: Inputs, space: Workspace, on_read: OnRead) -> Measures:
            return measure(replace(inputs, on_read=on_read), space, density)

        measures = map_tensors(
            work, floating, size=_nbytes, dtype=_arithmetic, threads=threads, on_bytes=on_bytes
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
        raise MergeError("a comparison needs a model beside the base, got none; name one")
    if density is None:
        return
    if not 0 < density <= 1:
        raise MergeError(f"density must be in (0, 1], got {density}; leave it out to compare all elements")
    if len(others) == 1:
        raise MergeError(
            "density trims task vectors before their signs are compared, and there is but one; name a base "
            "and two models, or leave density out"
        )


@dataclass(frozen=True)
class _FirstRows:
    """The first rows of a tensor; see `Readable`."""

    tensor: Readable
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def row_length(self) -> int:
        return self.tensor.row_length

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        self.tensor.read(start, stop, out)


def _comparable(checkpoints: Mapping[str, Checkpoint]) -> tuple[dict[str, dict[str, Readable]], list[str]]:
    """The tensors to compare, of the same names and vocabularies in all models, and what was done for it."""
    found = matched(checkpoints)
    tensors = found.tensors
    notes = [
        f"{spec} has no {name}: its embedding, which is its head, is compared in its place"
        for spec, name in found.lent.items()
    ]
    _check_names(tensors)
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


def _check_names(tensors: Tensors) -> None:
    """Refuse models of which one has a tensor that another lacks."""
    for spec, own in tensors.items():
        for other, names in tensors.items():
            lacking = next((name for name in own if name not in names), None)
            if lacking is not None:
                raise MergeError(
                    f"{other} lacks tensor {lacking}, which {spec} has; only models with the same tensors "
                    "can be compared"
                )


def _inputs(name: str, base: str, others: Sequence[str], tensors: Tensors) -> Inputs:
    """One tensor of all models."""
    first = tensors[base][name]
    for spec in others:
        other = tensors[spec][name]
        if tuple(other.shape) != tuple(first.shape):
            raise MergeError(
                f"tensor {name} has shape {list(first.shape)} in {base} and {list(other.shape)} in {spec}; "
                "only models of one architecture and size can be compared"
            )
        exact = not (first.dtype.is_floating_point and other.dtype.is_floating_point)
        if exact and first.dtype != other.dtype:
            raise MergeError(
                f"tensor {name} is {first.dtype} in {base} and {other.dtype} in {spec}; integers can only be "
                "compared with their like"
            )
    return Inputs(name, first, tuple(tensors[spec][name] for spec in others), (base, *others))


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


def _arithmetic(inputs: Inputs) -> torch.dtype:
    return working_dtype([tensor.dtype for tensor in inputs.all])


def _nbytes(inputs: Inputs) -> int:
    return inputs.numel * sum(tensor.dtype.itemsize for tensor in inputs.all)


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
