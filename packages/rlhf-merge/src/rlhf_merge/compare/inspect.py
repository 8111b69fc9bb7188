"""What is in a model: every tensor's shape, type and statistics, and where it holds NaN or infinities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from rlhf_merge.compare.statistics import Statistics
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import open_checkpoint
from rlhf_merge.files.config_json import tied
from rlhf_merge.methods.blocks import Inputs, Workspace
from rlhf_merge.methods.threads import OnRead, map_tensors
from rlhf_merge.names.tensor_kinds import EMBEDDING, HEAD, NORM, OTHER, Place, ordered_rows, place_tensors
from rlhf_merge.report_text import bytes_text, count_text, number_text, plain, share_text, table
from rlhf_merge.run.matching import is_buffer
from rlhf_merge.tensors import Readable
from rlhf_merge.vocab.union import vocabulary_rows


@dataclass(frozen=True)
class TensorSummary:
    """One tensor.

    Args:
        name: of the tensor.
        place: its layer and kind.
        shape: of the tensor.
        dtype: float32, bfloat16, int64 and so on.
        nbytes: bytes on disk.
        buffer: whether it is a constant that every version of transformers makes anew.
        statistics: of its elements.
    """

    name: str
    place: Place
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    buffer: bool
    statistics: Statistics

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSummary:
    """A model.

    Args:
        spec: as the user named it.
        architecture: of config.json; None where it names none.
        tensors: in the order of the files.
        vocabulary_rows: of the embedding of tokens; None where there is none.
        tied_head: whether the head is the embedding; None where there is neither.
        adapters: the folders of the adapters that are applied, in order.
    """

    spec: str
    architecture: str | None
    tensors: tuple[TensorSummary, ...]
    vocabulary_rows: int | None
    tied_head: bool | None
    adapters: tuple[str, ...]

    @cached_property
    def parameters(self) -> int:
        """Elements of all tensors but buffers; a tied head that is saved a second time does not count."""
        return sum(
            tensor.numel
            for tensor in self.tensors
            if not tensor.buffer and not (self.tied_head and tensor.place.row == HEAD)
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def layers(self) -> int:
        """Number of layers, of all stacks together."""
        return len({tensor.place.row for tensor in self.tensors if tensor.place.in_layer})

    @cached_property
    def dtypes(self) -> dict[str, tuple[int, int]]:
        """For each type, the number of tensors and of their elements; the commonest first."""
        counts: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            tensors, elements = counts.get(tensor.dtype, (0, 0))
            counts[tensor.dtype] = (tensors + 1, elements + tensor.numel)
        return dict(sorted(counts.items(), key=lambda item: -item[1][1]))

    @cached_property
    def not_finite(self) -> tuple[TensorSummary, ...]:
        """The tensors with NaN or an infinity."""
        return tuple(tensor for tensor in self.tensors if tensor.statistics.nan or tensor.statistics.inf)


def inspect_model(
    spec: str,
    *,
    threads: int | None = None,
    on_total: Callable[[int], None] | None = None,
    on_bytes: OnRead | None = None,
) -> ModelSummary:
    """Read a whole model once, and say what is in it."""
    with open_checkpoint(spec) as checkpoint:
        places = place_tensors(checkpoint.tensors)
        items = [Inputs(name, None, (tensor,)) for name, tensor in checkpoint.tensors.items()]
        if on_total is not None:
            on_total(sum(item.nbytes for item in items))
        statistics = map_tensors(
            _statistics,
            items,
            size=lambda item: item.nbytes,
            dtype=lambda item: _arithmetic(item.models[0]),
            threads=threads,
            on_bytes=on_bytes,
        )
        rows = {place.row for place in places.values()}
        has_head = tied(checkpoint.config, has_head=HEAD in rows) if rows & {EMBEDDING, HEAD} else None
        return ModelSummary(
            spec=spec,
            architecture=_architecture(checkpoint.config),
            tensors=tuple(
                TensorSummary(
                    item.name,
                    places[item.name],
                    item.shape,
                    str(item.models[0].dtype).removeprefix("torch."),
                    item.nbytes,
                    is_buffer(item.name, item.shape),
                    found,
                )
                for item, found in zip(items, statistics, strict=True)
            ),
            vocabulary_rows=vocabulary_rows(checkpoint.tensors),
            tied_head=has_head,
            adapters=tuple(str(folder) for folder in checkpoint.adapter_folders),
        )


def _statistics(item: Inputs, space: Workspace, on_read: OnRead) -> Statistics:
    """Of one tensor, read block by block."""
    (tensor,) = item.models
    found = Statistics()
    for start, stop in item.ranges():
        values = space.take("values", stop - start)
        if tensor.dtype.is_floating_point:
            tensor.read(start, stop, values)
        else:
            integers = torch.empty(stop - start, dtype=tensor.dtype)
            tensor.read(start, stop, integers)
            values.copy_(integers)
        found.add(values, space.take("scratch", stop - start))
        on_read((stop - start) * tensor.dtype.itemsize)
    return found


def _arithmetic(tensor: Readable) -> torch.dtype:
    """float32 holds the elements of narrower types, float64 those of the others."""
    narrow = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return torch.float32 if narrow else torch.float64


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return str(config["model_type"]) if config.get("model_type") else None


def summary_json(summary: ModelSummary) -> dict[str, Any]:
    """A summary as plain values; what is not finite is null."""
    return {
        "model": summary.spec,
        "architecture": summary.architecture,
        "parameters": summary.parameters,
        "bytes": summary.nbytes,
        **{key: getattr(summary, key) for key in ("layers", "vocabulary_rows", "tied_head")},
        "adapters": list(summary.adapters),
        "dtypes": {
            dtype: {"tensors": tensors, "elements": elements}
            for dtype, (tensors, elements) in summary.dtypes.items()
        },
        "not_finite": [tensor.name for tensor in summary.not_finite],
        "tensors": [_tensor_json(tensor) for tensor in summary.tensors],
    }


def _tensor_json(tensor: TensorSummary) -> dict[str, Any]:
    found = tensor.statistics
    return {
        "name": tensor.name,
        "layer": tensor.place.row,
        "kind": tensor.place.kind,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "bytes": tensor.nbytes,
        **{key: plain(getattr(found, key)) for key in ("norm", "mean", "std")},
        "least_magnitude": plain(found.least),
        "largest_magnitude": plain(found.largest),
        **{key: getattr(found, key) for key in ("zeros", "nan", "inf")},
        "buffer": tensor.buffer,
    }


def render_summary(summary: ModelSummary, *, by: str = "layer") -> RenderableType:
    """A summary for a terminal."""
    if by not in ("layer", "tensor"):
        raise MergeError(f"by must be layer or tensor, got {by!r}", code="invalid_value", key="by")
    rows = _layer_table(summary) if by == "layer" else _tensor_table(summary)
    alarm = [
        f"{tensor.name}: {tensor.statistics.nan} NaN, {tensor.statistics.inf} infinite of {tensor.numel}"
        for tensor in summary.not_finite
    ]
    if alarm:
        alarm.insert(0, "No merge takes a model with NaN or infinities:")
    return Group(_totals(summary), rows, *(Text(line, style="bold red") for line in alarm))


def _totals(summary: ModelSummary) -> RenderableType:
    dtypes = (f"{dtype} ({count_text(elements)})" for dtype, (_, elements) in summary.dtypes.items())
    facts = {
        "model": summary.spec,
        "architecture": summary.architecture or "–",
        "parameters": f"{count_text(summary.parameters)} in {len(summary.tensors)} tensors",
        "size": bytes_text(summary.nbytes),
        "types": ", ".join(dtypes),
        "layers": str(summary.layers),
        "vocabulary": "–" if summary.vocabulary_rows is None else f"{summary.vocabulary_rows} rows",
        "head": {True: "tied to the embedding", False: "its own", None: "–"}[summary.tied_head],
        "adapters": ", ".join(summary.adapters),
    }
    return Text("".join(f"{fact:14}{value}\n" for fact, value in facts.items() if value))


def _layer_table(summary: ModelSummary) -> RenderableType:
    families = [
        family
        for family in ("attention", "mlp", NORM, OTHER)
        if any(tensor.place.family == family for tensor in summary.tensors)
    ]
    rms = (f"RMS\n{family}" for family in families)
    made = table("layer", "tensors", "params", *rms, "max", "zeros", "NaN\nInf")
    for row in ordered_rows(tensor.place for tensor in summary.tensors):
        tensors = [tensor for tensor in summary.tensors if tensor.place.row == row]
        found = [tensor.statistics for tensor in tensors]
        made.add_row(
            row,
            str(len(tensors)),
            count_text(sum(tensor.numel for tensor in tensors)),
            *(
                number_text(_rms(tensor.statistics for tensor in tensors if tensor.place.family == family))
                for family in families
            ),
            number_text(max(one.largest for one in found)),
            *_zeros_and_bad(found),
        )
    return made


def _tensor_table(summary: ModelSummary) -> RenderableType:
    made = table("tensor", "shape", "type", "norm", "std", "max", "zeros", "NaN\nInf")
    for tensor in sorted(summary.tensors, key=lambda tensor: tensor.place.position):
        found = tensor.statistics
        made.add_row(
            Text(tensor.name + (" (buffer)" if tensor.buffer else "")),
            "×".join(map(str, tensor.shape)) or "scalar",
            tensor.dtype,
            *map(number_text, (found.norm, found.std, found.largest)),
            *_zeros_and_bad([found]),
        )
    return made


def _rms(statistics: Iterable[Statistics]) -> float | None:
    found = list(statistics)
    count = sum(one.count for one in found)
    return math.sqrt(sum(one.norm**2 for one in found) / count) if count else None


def _zeros_and_bad(found: Sequence[Statistics]) -> tuple[str, Text]:
    """The share of zeros, and the numbers of NaN and infinities."""
    nan, inf = sum(one.nan for one in found), sum(one.inf for one in found)
    count = sum(one.count for one in found) + nan + inf
    zeros = share_text(sum(one.zeros for one in found) / count if count else None)
    return zeros, Text(f"{nan}, {inf}", style="bold red") if nan or inf else Text("0", style="dim")
