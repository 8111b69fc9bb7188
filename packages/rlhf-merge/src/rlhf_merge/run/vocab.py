"""Vocabularies that differ: which row of each model a row of the output comes from, and how it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rlhf_merge.errors import MergeError
from rlhf_merge.files.tokenizer import AddedToken, TokenTable
from rlhf_merge.methods.blocks import Readable, piece


@dataclass(frozen=True)
class ModelVocab:
    """The vocabulary of one model; messages call it `label`."""

    label: str
    rows: int
    """Rows of its embedding; more than its tokens where it is padded."""
    tokens: TokenTable | None
    """None where it has no tokenizer, or one whose tokens are not read."""


@dataclass(frozen=True)
class Alignment:
    """Sources of the rows of the output's vocabulary."""

    rows: int
    indexes: tuple[np.ndarray | None, ...]
    """For each model, the row of it that each output row is, (rows,) int64, -1 where it lacks the token; None
    where its rows are the output's as they are."""
    tokenizer: int
    """Position of the model whose tokenizer files the output gets."""
    added: tuple[AddedToken, ...] = ()
    """Tokens to append to those files, each with its id; empty but for unions."""


def align(mode: str | None, models: Sequence[ModelVocab], reference: int, *, tensor: str) -> Alignment:
    """Decide which rows of the models make the output's vocabulary.

    Modes are None: the vocabularies must agree; "truncate": the first rows, which all models have; "union":
    the reference's tokens and the added tokens of the others; "base": the reference's tokens; or the label of
    the model whose tokens to take. A model without tokens is taken to have those of the reference (of the
    model named in `mode`) if it has as many rows. `reference` is the index of the base model, or of the
    first model if no base is set; `tensor` is the name of the input embedding, for error messages.
    """
    first, base = models[0], models[reference]
    fewest = min(model.rows for model in models)
    if mode is None:
        united = base.tokens is not None and base.tokens.fast and all(model.tokens for model in models)
        union = "--vocab union (all tokens) or " if united else ""
        for other in models:
            if other.rows != first.rows:
                found = f"{tensor} has {first.rows} rows in {first.label} but {other.rows} in {other.label}"
                message = f"{found}; use {union}--vocab truncate (the first {fewest}, which all models have)"
                raise MergeError(message, code="different_row_counts", tensor=tensor)
    if mode in (None, "truncate"):
        _check_tokens(models, reference, fewest)
        indexes = tuple(None if model.rows == fewest else np.arange(fewest) for model in models)
        # Of the models with the fewest rows, one with a tokenizer, and the reference rather than another.
        few = [i for i, model in enumerate(models) if model.rows == fewest]
        lender = min(few, key=lambda i: (models[i].tokens is None, i != reference))
        return Alignment(fewest, indexes, reference if mode is None else lender)
    if mode == "union":
        return _union(models, reference)
    labels = [model.label for model in models]
    target = reference if mode == "base" else labels.index(mode)
    return _onto(models, target, _tokens(models[target]).ids, models[target].rows)


def _check_tokens(models: Sequence[ModelVocab], reference: int, rows: int) -> None:
    """Refuse models in which one of the first `rows` rows means different tokens."""
    known: dict[int, tuple[str, str]] = {}
    checked: list[Mapping[str, int]] = []
    for model in (models[reference], *models):
        if model.tokens is None or model.tokens.ids in checked:
            continue
        checked.append(model.tokens.ids)
        mine = {i: token for token, i in model.tokens.ids.items() if i < rows}
        differing = [i for i, token in mine.items() if i in known and known[i][0] != token]
        if differing:
            i = min(differing)
            found = f"token {i} is {known[i][0]!r} in {known[i][1]} but {mine[i]!r} in {model.label}"
            advice = f"--vocab union (all tokens) or --vocab {models[reference].label} (its tokens)"
            raise MergeError(f"{found}; use {advice}", code="different_tokens", token_id=i)
        known |= {i: (token, model.label) for i, token in mine.items() if i not in known}


def _union(models: Sequence[ModelVocab], reference: int) -> Alignment:
    """The reference's vocabulary with the added tokens of the other models behind it."""
    target = models[reference]
    table = _tokens(target)
    ids, added = dict(table.ids), []
    for model in (model for model in models if model.tokens is not None):
        own = _tokens(model)
        lacking = sorted((i, text) for text, i in own.ids.items() if text not in ids and i < model.rows)
        regular = next((text for _, text in lacking if text not in own.added), None)
        advice = f"use --vocab {target.label} (its tokens)"
        if regular is not None:
            found = f"the tokenizer of {model.label} was trained with other tokens than {target.label}'s"
            message = f"{found}, such as {regular!r}; {advice}"
            raise MergeError(message, code="different_tokenizers", model=model.label)
        if lacking and not table.fast:
            message = f"{target.label} has no tokenizer.json to append tokens to; save a fast one, or "
            raise MergeError(message + advice, code="tokenizer_not_fast", model=target.label)
        # The tokenizers library numbers an appended token by the count of tokens, whatever id its file gives.
        if lacking and not added and set(table.ids.values()) != set(range(len(table.ids))):
            found = f"the tokens of {target.label} do not have the ids 0 to {len(table.ids) - 1}"
            message = f"{found}, so none can be appended; {advice}"
            raise MergeError(message, code="token_ids_not_contiguous", model=target.label)
        for _, text in lacking:
            ids[text] = len(ids)
            added.append({**own.added[text], "id": ids[text]})
    rows = max([max(ids.values(), default=-1) + 1, *(model.rows for model in models)])
    return Alignment(rows, _onto(models, reference, ids, rows).indexes, reference, tuple(added))


def _tokens(model: ModelVocab) -> TokenTable:
    if model.tokens is None:
        message = f"{model.label} has no tokenizer.json, vocab.json or vocab.txt; put one there"
        raise MergeError(f"{message}, or use --vocab truncate", code="missing_tokenizer", model=model.label)
    return model.tokens


def _onto(models: Sequence[ModelVocab], target: int, ids: Mapping[str, int], rows: int) -> Alignment:
    """The alignment to given tokens: rows without a token, padding, stay where they are."""
    named = {i: text for text, i in ids.items() if i < rows}
    indexes: list[np.ndarray | None] = []
    for model in models:
        same = model.tokens is None and model.rows == models[target].rows
        tokens = _tokens(models[target] if same else model).ids
        index = np.arange(rows, dtype=np.int64)
        index[model.rows :] = -1
        own = np.fromiter(tokens.values(), np.int64, len(tokens))
        index[own[own < rows]] = -1
        for row, text in named.items():
            source = tokens.get(text, -1)
            index[row] = source if source < model.rows else -1
        unchanged = model.rows == rows and np.array_equal(index, np.arange(rows))
        indexes.append(None if unchanged else index)
    return Alignment(rows, tuple(indexes), target)


def aligned(
    name: str,
    tensors: Sequence[Readable | None],
    models: Sequence[ModelVocab],
    alignment: Alignment,
    base: int | None,
) -> list[Readable | None]:
    """A vocabulary tensor of every model, None where one lacks it, with the rows of the output.

    `base` is the position of the model whose rows fill those that others lack. Tensors that differ in more
    than their rows are refused.
    """
    there = [(model, tensor) for model, tensor in zip(models, tensors, strict=True) if tensor is not None]
    for model, tensor in there:
        expected = (model.rows, *there[0][1].shape[1:])
        if tuple(tensor.shape) != expected:
            message = f"{name} has shape {tuple(tensor.shape)} in {model.label}, expected {expected}"
            raise MergeError(message, code="different_shapes", tensor=name)
    return [
        AlignedTensor(i, tensors, alignment, base)
        if tensor is not None and alignment.indexes[i] is not None
        else tensor
        for i, tensor in enumerate(tensors)
    ]


class AlignedTensor:
    """A vocabulary tensor of one model, with the rows of the output; see `Readable`.

    A row of a token that the model lacks is the base's row if the base has the token, else the mean (in
    float32) of the rows of the models that have it, else, for padding that no model has, zero.
    """

    def __init__(
        self, model: int, tensors: Sequence[Readable | None], alignment: Alignment, base: int | None
    ) -> None:
        own = tensors[model]
        assert own is not None, "a tensor that the model lacks cannot be aligned"
        self._sources = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None}
        self._order = [model, *([base] if base in self._sources else [])]
        self._alignment = alignment
        self.shape, self.dtype = (alignment.rows, *own.shape[1:]), own.dtype
        self.row_length = math.prod(own.shape[1:])
        assert not any(self.row_length % tensor.row_length for tensor in self._sources.values())

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """See `Readable.read`."""
        rows = np.arange(start // self.row_length, stop // self.row_length)
        owners, sources = np.full(len(rows), -1), rows  # of each row, the model it is read from and where
        for model in reversed(self._order):
            index = self._rows_of(model, rows)
            owners, sources = np.where(index < 0, owners, model), np.where(index < 0, sources, index)
        # Rows that are adjacent in a model are read at once.
        cuts = np.flatnonzero((np.diff(owners) != 0) | (np.diff(sources) != 1)) + 1
        for begin, end in pairwise(sorted({0, *cuts.tolist(), len(rows)})):
            target = out[begin * self.row_length : end * self.row_length]
            source = int(sources[begin]) * self.row_length
            if owners[begin] >= 0:
                self._sources[int(owners[begin])].read(source, source + len(target), target)
                continue
            for row, part in zip(rows[begin:end], target.split(self.row_length), strict=True):
                part.copy_(self._mean(row, torch.promote_types(out.dtype, torch.float32)))

    def _rows_of(self, model: int, rows: np.ndarray) -> np.ndarray:
        """A model's rows of some output rows."""
        index = self._alignment.indexes[model]
        return rows if index is None else index[rows]

    def _mean(self, row: int, dtype: torch.dtype) -> Tensor:
        """The mean of the models' rows of an output row."""
        total, count = torch.zeros(self.row_length, dtype=dtype), 0
        for model, tensor in self._sources.items():
            source = int(self._rows_of(model, np.array(row))) * self.row_length
            if source >= 0:
                total += piece(tensor, source, source + self.row_length, dtype)
                count += 1
        return total / max(count, 1)
