"""Vocabulary tensors of a model, read with the rows of the output's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

import numpy as np
import torch

from rlhf_merge.errors import MergeError
from rlhf_merge.tensors import Readable
from rlhf_merge.vocab.union import Alignment, ModelVocab

_LACKING = np.iinfo(np.int64).min
"""Stands for the distance of a row that a model lacks from its place; no true distance is so low."""


def aligned(
    name: str,
    tensors: Sequence[Readable | None],
    models: Sequence[ModelVocab],
    alignment: Alignment,
    base: int | None,
) -> list[Readable | None]:
    """Return a vocabulary tensor of every model with the rows of the output.

    Args:
        name: of the tensor.
        tensors: in the order of `models`; None where a model lacks it.
        models: as they were aligned.
        alignment: what `align` returned.
        base: position of the base, whose rows fill those that other models lack; None where there is no base.

    Raises:
        MergeError: the tensors differ in more than their rows.
    """
    there = [(model, tensor) for model, tensor in zip(models, tensors, strict=True) if tensor is not None]
    for model, tensor in there:
        expected = (model.rows, *there[0][1].shape[1:])
        if tuple(tensor.shape) != expected:
            raise MergeError(
                f"{name} has shape {tuple(tensor.shape)} in {model.label}, expected {expected}",
                code="different_shapes",
                tensor=name,
            )
    return [
        tensor
        if tensor is None or alignment.indexes[i] is None
        else AlignedTensor(i, tensors, alignment, base)
        for i, tensor in enumerate(tensors)
    ]


class AlignedTensor:
    """A vocabulary tensor of one model, with the rows of the output.

    A row of a token that the model lacks is the base's row if the base has the token, else the mean (in
    float32) of the rows of the models that have it, else, for padding that no model has, zero.

    Args:
        model: position of the model.
        tensors: that tensor of every model; None where a model lacks it.
        alignment: what `align` returned, with an index for this model.
        base: position of the base, or None.
    """

    def __init__(
        self, model: int, tensors: Sequence[Readable | None], alignment: Alignment, base: int | None
    ) -> None:
        own = tensors[model]
        assert own is not None, "a tensor that the model lacks cannot be aligned"
        self._model, self._base = model, base if base is not None and tensors[base] is not None else None
        self._sources = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None}
        self._alignment = alignment
        self.shape: tuple[int, ...] = (alignment.rows, *own.shape[1:])
        self.dtype: torch.dtype = own.dtype
        self.row_length: int = prod(own.shape[1:])
        for tensor in self._sources.values():
            assert self.row_length % tensor.row_length == 0, "a row must be readable by itself"

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements `start` to `stop`, multiples of `row_length`, to `out`, (stop - start,)."""
        first, last = start // self.row_length, stop // self.row_length
        for low, high in self._read_rows(self._model, first, last, out, first):
            filled = (
                [(low, high)] if self._base is None else self._read_rows(self._base, low, high, out, first)
            )
            for begin, end in filled:
                for row in range(begin, end):
                    self._write_mean(row, self._slice(out, row, row + 1, first))

    def _read_rows(
        self, model: int, low: int, high: int, out: torch.Tensor, first: int
    ) -> Iterator[tuple[int, int]]:
        """Write the output rows `low` to `high` that a model has; yield the runs of those it lacks."""
        index = self._rows_of(model, low, high)
        offsets = np.where(index < 0, _LACKING, index - np.arange(len(index)))
        edges = sorted({0, *(np.flatnonzero(offsets[1:] != offsets[:-1]) + 1).tolist(), len(index)})
        for begin, end in pairwise(edges):
            source = int(index[begin])
            if source < 0:
                yield low + begin, low + end
                continue
            piece = self._slice(out, low + begin, low + end, first)
            source *= self.row_length
            self._sources[model].read(source, source + len(piece), piece)

    def _rows_of(self, model: int, low: int, high: int) -> np.ndarray:
        """Return a model's rows of the output rows `low` to `high`."""
        index = self._alignment.indexes[model]
        return np.arange(low, high, dtype=np.int64) if index is None else index[low:high]

    def _slice(self, out: torch.Tensor, low: int, high: int, first: int) -> torch.Tensor:
        return out[(low - first) * self.row_length : (high - first) * self.row_length]

    def _write_mean(self, row: int, out: torch.Tensor) -> None:
        """Write the mean of the models' rows of an output row."""
        kind = torch.promote_types(out.dtype, torch.float32)
        total = torch.zeros(len(out), dtype=kind, device=out.device)
        count = 0
        for model, tensor in self._sources.items():
            source = int(self._rows_of(model, row, row + 1)[0]) * self.row_length
            if source >= 0:
                one = torch.empty_like(total)
                tensor.read(source, source + self.row_length, one)
                total += one
                count += 1
        out.copy_(total / max(count, 1))
