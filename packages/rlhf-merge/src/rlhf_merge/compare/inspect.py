"""What is in a model: every tensor's shape, type and statistics, and where it holds NaN or infinities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlhf_merge.compare.statistics import Statistics
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import Checkpoint, open_checkpoint
from rlhf_merge.files.config_json import tied
from rlhf_merge.methods.blocks import Inputs, Workspace
from rlhf_merge.methods.threads import OnRead, map_tensors
from rlhf_merge.names.tensor_kinds import EMBEDDING, HEAD, NORM, OTHER, Place, ordered_rows, place_tensors
from rlhf_merge.report_text import bytes_text, count_text, number_text, plain, share_text, table
from rlhf_merge.run.matching import is_buffer
from rlhf_merge.tensors import Readable
from rlhf_merge.vocab.union import vocabulary_rows

_SHORT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class TensorSummary:
    """One tensor; the statistics are those of its finite elements.

    Args:
        name: of the tensor.
        place: its layer and kind.
        shape: of the tensor.
        dtype: float32, bfloat16, int64 and so on.
        nbytes: bytes on disk.
        norm: L2.
        mean: None where no element is finite; as are the next three.
        std: root of the mean squared distance from the mean.
        least: smallest magnitude.
        largest: largest magnitude.
        zeros: number of elements equal to 0.
        nan: number of elements that are NaN.
        inf: number of elements that are infinite.
        buffer: whether it is a constant that every version of transformers makes anew.
    """

    name: str
    place: Place
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    norm: float
    mean: float | None
    std: float | None
    least: float | None
    largest: float | None
    zeros: int
    nan: int
    inf: int
    buffer: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def finite(self) -> int:
        """Number of elements that are neither NaN nor infinite."""
        return self.numel - self.nan - self.inf


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
        return tuple(tensor for tensor in self.tensors if tensor.nan or tensor.inf)


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
        if on_total is not None:
            on_total(sum(_nbytes(tensor) for tensor in checkpoint.tensors.values()))

        def work(item: tuple[str, Readable], space: Workspace, on_read: OnRead) -> TensorSummary:
            name, tensor = item
            return _summarise(name, tensor, places[name], space, on_read)

        tensors = map_tensors(
            work,
            list(checkpoint.tensors.items()),
            size=lambda item: _nbytes(item[1]),
            dtype=lambda item: _arithmetic(item[1]),
            threads=threads,
            on_bytes=on_bytes,
        )
        return ModelSummary(
            spec=spec,
            architecture=_architecture(checkpoint.config),
            tensors=tuple(tensors),
            vocabulary_rows=vocabulary_rows(checkpoint.tensors),
            tied_head=_tied_head(checkpoint, places),
            adapters=tuple(str(folder) for folder in checkpoint.adapter_folders),
        )


def _summarise(name: str, tensor: Readable, place: Place, space: Workspace, on_read: OnRead) -> TensorSummary:
    """One tensor, read block by block."""
    found = Statistics()
    for start, stop in Inputs(name, None, (tensor,)).ranges():
        values = space.take("values", stop - start)
        if tensor.dtype.is_floating_point:
            tensor.read(start, stop, values)
        else:
            integers = torch.empty(stop - start, dtype=tensor.dtype)
            tensor.read(start, stop, integers)
            values.copy_(integers)
        found.add(values, space.take("scratch", stop - start))
        on_read((stop - start) * tensor.dtype.itemsize)
    some = found.count > 0
    return TensorSummary(
        name=name,
        place=place,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        nbytes=_nbytes(tensor),
        norm=found.norm,
        mean=found.mean if some else None,
        std=math.sqrt(found.squares / found.count) if some else None,
        least=found.least if some else None,
        largest=found.largest if some else None,
        zeros=found.zeros,
        nan=found.nan,
        inf=found.inf,
        buffer=is_buffer(name, tuple(tensor.shape)),
    )


def _arithmetic(tensor: Readable) -> torch.dtype:
    """float32 holds the elements of narrower types, float64 those of the others."""
    narrow = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return torch.float32 if narrow else torch.float64


def _nbytes(tensor: Readable) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return str(config["model_type"]) if config.get("model_type") else None


def _tied_head(checkpoint: Checkpoint, places: Mapping[str, Place]) -> bool | None:
    rows = {place.row for place in places.values()}
    return tied(checkpoint.config, has_head=HEAD in rows) if rows & {EMBEDDING, HEAD} else None


def render_summary(summary: ModelSummary, *, by: str = "layer") -> RenderableType:
    """A summary for a terminal."""
    tables = {"layer": _layer_table, "tensor": _tensor_table}
    if by not in tables:
        raise MergeError(f"by must be layer or tensor, got {by!r}")
    return Group(_totals(summary), "", *tables[by](summary), *_alarm(summary))


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
    return {
        "name": tensor.name,
        "layer": tensor.place.row,
        "kind": tensor.place.kind,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "bytes": tensor.nbytes,
        **{key: plain(getattr(tensor, key)) for key in ("norm", "mean", "std")},
        "least_magnitude": plain(tensor.least),
        "largest_magnitude": plain(tensor.largest),
        **{key: getattr(tensor, key) for key in ("zeros", "nan", "inf", "buffer")},
    }


def _totals(summary: ModelSummary) -> RenderableType:
    head = {True: "tied to the embedding", False: "its own", None: "–"}[summary.tied_head]
    dtypes = (f"{dtype} ({count_text(elements)})" for dtype, (_, elements) in summary.dtypes.items())
    facts = {
        "model": summary.spec,
        "architecture": summary.architecture or "–",
        "parameters": f"{count_text(summary.parameters)} in {len(summary.tensors)} tensors",
        "size": bytes_text(summary.nbytes),
        "types": ", ".join(dtypes),
        "layers": str(summary.layers),
        "vocabulary": f"{summary.vocabulary_rows} rows" if summary.vocabulary_rows is not None else "–",
        "head": head,
    }
    if summary.adapters:
        facts["adapters"] = ", ".join(summary.adapters)
    grid = Table.grid(padding=(0, 2))
    for fact, value in facts.items():
        grid.add_row(Text(fact, style="bold"), Text(value))
    return grid


def _layer_table(summary: ModelSummary) -> list[RenderableType]:
    groups: dict[str, list[TensorSummary]] = {}
    for tensor in summary.tensors:
        groups.setdefault(tensor.place.row, []).append(tensor)
    families = [
        family
        for family in ("attention", "mlp", NORM, OTHER)
        if any(tensor.place.family == family for tensor in summary.tensors)
    ]
    rms = (f"RMS\n{family}" for family in families)
    made = table("layer", "tensors", "params", *rms, "max", "zeros", "NaN\nInf")
    for row in ordered_rows(tensor.place for tensor in summary.tensors):
        tensors = groups[row]
        made.add_row(
            row,
            str(len(tensors)),
            count_text(sum(tensor.numel for tensor in tensors)),
            *(number_text(_rms(tensors, family)) for family in families),
            number_text(max((tensor.largest or 0.0 for tensor in tensors), default=None)),
            share_text(_zeros(tensors)),
            _bad(tensors),
        )
    return [made, "", Text("RMS: root mean square of the elements; max: largest of their magnitudes", "dim")]


def _tensor_table(summary: ModelSummary) -> list[RenderableType]:
    made = table("tensor", "shape", "type", "norm", "std", "max", "zeros", "NaN\nInf")
    for tensor in sorted(summary.tensors, key=lambda tensor: tensor.place.position):
        made.add_row(
            Text(tensor.name + (" (buffer)" if tensor.buffer else "")),
            "×".join(map(str, tensor.shape)) or "scalar",
            _SHORT_TYPES.get(tensor.dtype, tensor.dtype),
            *(number_text(value) for value in (tensor.norm, tensor.std, tensor.largest)),
            share_text(_zeros([tensor])),
            _bad([tensor]),
        )
    return [made, ""]


def _alarm(summary: ModelSummary) -> list[RenderableType]:
    """The names of the tensors that would spoil a merge."""
    if not summary.not_finite:
        return [Text("No NaN, no infinity.", style="green")]
    count = len(summary.not_finite)
    title = f"{count} tensor{'s' if count > 1 else ''} with NaN or infinities; no merge takes such a model"
    lines = [
        f"{tensor.name}: {tensor.nan} NaN, {tensor.inf} infinite of {tensor.numel}"
        for tensor in summary.not_finite
    ]
    return [Panel(Text("\n".join(lines)), title=title, title_align="left", style="bold red")]


def _rms(tensors: Sequence[TensorSummary], family: str) -> float | None:
    chosen = [tensor for tensor in tensors if tensor.place.family == family]
    count = sum(tensor.finite for tensor in chosen)
    return math.sqrt(sum(tensor.norm**2 for tensor in chosen) / count) if count else None


def _zeros(tensors: Sequence[TensorSummary]) -> float | None:
    count = sum(tensor.numel for tensor in tensors)
    return sum(tensor.zeros for tensor in tensors) / count if count else None


def _bad(tensors: Sequence[TensorSummary]) -> Text:
    nan, inf = sum(tensor.nan for tensor in tensors), sum(tensor.inf for tensor in tensors)
    return Text(f"{nan}, {inf}", style="bold red") if nan or inf else Text("0", style="dim")
