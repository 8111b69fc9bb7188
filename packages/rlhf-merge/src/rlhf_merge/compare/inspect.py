"""Inspection of a model: shape, type and statistics of every tensor, with its NaNs and infinities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from rlhf_merge.compare.kinds import EMBEDDING, HEAD, NORM, OTHER, Place, ordered_rows, place_tensors
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import open_checkpoint
from rlhf_merge.files.config_json import tied
from rlhf_merge.methods.blocks import Begin, Inputs, OnBytes, Spaces, map_tensors
from rlhf_merge.names import vocabulary_rows
from rlhf_merge.run.matching import is_buffer
from rlhf_merge.text import bytes_text, count_text, number_text, plain, share_text, table


@dataclass
class Statistics:
    """Of the finite elements of a tensor, seen block by block; `least` and `largest` are magnitudes."""

    count: int = 0
    mean: float = math.nan
    squares: float = 0.0
    """Σ (x - mean)²."""
    least: float = math.inf
    largest: float = -math.inf
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def norm(self) -> float:
        """L2 norm of the finite elements."""
        return math.sqrt(self.squares + self.count * self.mean**2) if self.count else 0.0

    @property
    def std(self) -> float:
        """Root of the mean squared distance from the mean; NaN where there is no finite element."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def add(self, values: Tensor, scratch: Tensor) -> None:
        """Take in a block.

        Two sets are put together by Chan, Golub, LeVeque, "Updating formulae …", 1979, eq. 2.1.
        """
        total = float(values.sum())
        if not math.isfinite(total):  # where all elements are finite, the sum overflowed
            finite = values[values.isfinite()]
            nan = int(values.isnan().sum())
            self.nan, self.inf = self.nan + nan, self.inf + len(values) - len(finite) - nan
            values = finite.double()
            total, scratch = float(values.sum()), torch.empty_like(values)
        if not len(values):
            return
        least, largest = (float(value) for value in torch.abs(values, out=scratch).aminmax())
        self.least, self.largest = min(self.least, least), max(self.largest, largest)
        if least == 0:
            self.zeros += len(values) - int(values.count_nonzero())
        mean, count = total / len(values), self.count + len(values)
        old = self.mean if self.count else 0.0
        squares = float(torch.dot(values.sub_(mean), values))
        if not math.isfinite(squares):  # float32 cannot hold the sum
            squares = float(torch.dot(values.double(), values.double()))
        self.squares += squares + (mean - old) ** 2 * self.count * len(values) / count
        self.mean = old + (mean - old) * len(values) / count
        self.count = count


@dataclass(frozen=True)
class TensorSummary:
    """One tensor: its name, layer and kind, shape, type, bytes on disk, and statistics."""

    name: str
    place: Place
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    buffer: bool
    """Whether it is a constant that every version of transformers recomputes."""
    statistics: Statistics

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSummary:
    """A model, as the user named it, and its tensors in the order of the files."""

    spec: str
    architecture: str | None
    tensors: tuple[TensorSummary, ...]
    vocabulary_rows: int | None
    tied_head: bool | None
    adapters: tuple[str, ...]

    @cached_property
    def parameters(self) -> int:
        """Elements of all tensors but buffers; a tied head that is saved a second time does not count."""
        counted = [tensor for tensor in self.tensors if not tensor.buffer]
        return sum(t.numel for t in counted if not (self.tied_head and t.place.row == HEAD))

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


def inspect_model(spec: str, *, threads: int | None = None, begin: Begin | None = None) -> ModelSummary:
    """Read a whole model once, and say what is in it."""
    with open_checkpoint(spec) as checkpoint:
        places = place_tensors(checkpoint.tensors)
        items = [Inputs(name, None, (tensor,)) for name, tensor in checkpoint.tensors.items()]
        on_bytes = begin(sum(item.nbytes for item in items)) if begin else None
        statistics = map_tensors(_statistics, items, threads=threads, on_bytes=on_bytes)
        summaries = [
            TensorSummary(
                item.name,
                places[item.name],
                item.shape,
                str(item.all[0].dtype).removeprefix("torch."),
                item.nbytes,
                is_buffer(item.name, item.shape),
                found,
            )
            for item, found in zip(items, statistics, strict=True)
        ]
        rows, config = {place.row for place in places.values()}, checkpoint.config
        names = config.get("architectures")
        architecture = names[0] if isinstance(names, list) and names else config.get("model_type")
        return ModelSummary(
            spec,
            str(architecture) if architecture else None,
            tuple(summaries),
            vocabulary_rows(checkpoint.tensors),
            tied(config, has_head=HEAD in rows) if rows & {EMBEDDING, HEAD} else None,
            tuple(str(folder) for folder in checkpoint.adapter_folders),
        )


def _statistics(item: Inputs, spaces: Spaces, on_read: OnBytes) -> Statistics:
    """Of one tensor, read block by block: in float32 where that holds its elements, else in float64."""
    (tensor,) = item.models
    narrow = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    space, found = spaces(torch.float32 if narrow else torch.float64), Statistics()
    for start, stop in item.ranges():
        values = space.take("values", stop - start)
        tensor.read(start, stop, values)
        found.add(values, space.take("scratch", stop - start))
        on_read((stop - start) * tensor.dtype.itemsize)
    return found


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
        "tensors": [
            {
                "name": tensor.name,
                "layer": tensor.place.row,
                "kind": tensor.place.kind,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "bytes": tensor.nbytes,
                **{key: plain(getattr(tensor.statistics, key)) for key in ("norm", "mean", "std")},
                "least_magnitude": plain(tensor.statistics.least),
                "largest_magnitude": plain(tensor.statistics.largest),
                **{key: getattr(tensor.statistics, key) for key in ("zeros", "nan", "inf")},
                "buffer": tensor.buffer,
            }
            for tensor in summary.tensors
        ],
    }


def render_summary(summary: ModelSummary, *, by: str = "layer") -> RenderableType:
    """A summary for a terminal."""
    if by not in ("layer", "tensor"):
        raise MergeError(f"by must be layer or tensor, got {by!r}", code="invalid_value", key="by")
    facts = {
        "model": summary.spec,
        "architecture": summary.architecture or "–",
        "parameters": f"{count_text(summary.parameters)} in {len(summary.tensors)} tensors",
        "size": bytes_text(summary.nbytes),
        "types": ", ".join(f"{name} ({count_text(count)})" for name, (_, count) in summary.dtypes.items()),
        "layers": str(summary.layers),
        "vocabulary": "–" if summary.vocabulary_rows is None else f"{summary.vocabulary_rows} rows",
        "head": {True: "tied to the embedding", False: "its own", None: "–"}[summary.tied_head],
        "adapters": ", ".join(summary.adapters),
    }
    totals = Text("".join(f"{fact:14}{value}\n" for fact, value in facts.items() if value))
    alarm = ["No merge takes a model with NaN or infinities:"] if summary.not_finite else []
    for tensor in summary.not_finite:
        found = tensor.statistics
        alarm.append(f"{tensor.name}: {found.nan} NaN, {found.inf} infinite of {tensor.numel}")
    rows = _layer_table(summary) if by == "layer" else _tensor_table(summary)
    return Group(totals, rows, *(Text(line, style="bold red") for line in alarm))


def _layer_table(summary: ModelSummary) -> RenderableType:
    families = {tensor.place.family for tensor in summary.tensors}
    shown = [family for family in ("attention", "mlp", NORM, OTHER) if family in families]
    rms = (f"RMS\n{family}" for family in shown)
    made = table("layer", "tensors", "params", *rms, "max", "zeros", "NaN\nInf")
    for row in ordered_rows(tensor.place for tensor in summary.tensors):
        tensors = [tensor for tensor in summary.tensors if tensor.place.row == row]
        cells = [str(len(tensors)), count_text(sum(tensor.numel for tensor in tensors))]
        for family in shown:
            found = [tensor.statistics for tensor in tensors if tensor.place.family == family]
            count = sum(one.count for one in found)
            square = sum(one.norm**2 for one in found)
            cells.append(number_text(math.sqrt(square / count) if count else None))
        largest = max(tensor.statistics.largest for tensor in tensors)
        made.add_row(row, *cells, number_text(largest), *_zeros_and_bad([t.statistics for t in tensors]))
    return made


def _tensor_table(summary: ModelSummary) -> RenderableType:
    made = table("tensor", "shape", "type", "norm", "std", "max", "zeros", "NaN\nInf")
    for tensor in sorted(summary.tensors, key=lambda tensor: tensor.place.position):
        found, name = tensor.statistics, Text(tensor.name + (" (buffer)" if tensor.buffer else ""))
        numbers = map(number_text, (found.norm, found.std, found.largest))
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        made.add_row(name, shape, tensor.dtype, *numbers, *_zeros_and_bad([found]))
    return made


def _zeros_and_bad(found: Sequence[Statistics]) -> tuple[str, Text]:
    """The share of zeros, and the numbers of NaN and infinities."""
    nan, inf = sum(one.nan for one in found), sum(one.inf for one in found)
    count = sum(one.count for one in found) + nan + inf
    zeros = share_text(sum(one.zeros for one in found) / count if count else None)
    return zeros, Text(f"{nan}, {inf}", style="bold red") if nan or inf else Text("0", style="dim")
