"""Vocabularies of models that differ: which row of each model a row of the output comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_merge.errors import MergeError
from rlhf_merge.files.small_files import AddedToken, TokenTable
from rlhf_merge.tensors import Readable

_INPUTS = (
    *("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight"),
    *("embed_in.weight", "shared.weight", "embeddings.weight"),
)
"""Names of input embeddings, the surest first; the last is Mamba's."""

_OUTPUTS = (
    *("lm_head.weight", "lm_head.bias", "lm_head.decoder.weight", "lm_head.decoder.bias"),
    *("cls.predictions.bias", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    *("output.weight", "embed_out.weight"),
)
"""Names of output heads and of their biases."""


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
    """Where the rows of the output's vocabulary come from.

    Args:
        rows: rows of the output.
        indexes: for each model, the row of it that each output row is, (rows,) int64, -1 where it lacks the
            token; None where its rows are the output's as they are.
        tokenizer: position of the model whose tokenizer files the output gets.
        added: tokens to append to those files, each with its id; empty but for unions.
    """

    rows: int
    indexes: tuple[np.ndarray | None, ...]
    tokenizer: int
    added: tuple[AddedToken, ...] = ()


def vocabulary_rows(tensors: Mapping[str, Readable]) -> int | None:
    """Return the rows of a model's input embedding, or None where no tensor has the name of one."""
    for suffix in _INPUTS:
        for name, tensor in tensors.items():
            if _ends(name, suffix) and len(tensor.shape) == 2:
                return tensor.shape[0]
    return None


def is_vocabulary_tensor(name: str, shape: Sequence[int], rows: int | None) -> bool:
    """Return whether a tensor has a row for each token: by its name and by its first dimension, the rows."""
    named = any(_ends(name, suffix) for suffix in (*_INPUTS, *_OUTPUTS))
    return named and rows is not None and len(shape) > 0 and shape[0] == rows


def _ends(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith("." + suffix)


def align(mode: str | None, models: Sequence[ModelVocab], reference: int, *, tensor: str) -> Alignment:
    """Decide which rows of the models make the output's vocabulary.

    Args:
        mode: None: the vocabularies must agree; "truncate": the first rows, which all models have; "union":
            the reference's tokens and the added tokens of the others; "base": the reference's tokens; or the
            label of the model whose tokens to take.
        models: the vocabularies; a model without tokens is taken to have those of the reference (of the model
            named in `mode`) if it has as many rows.
        reference: position of the base, or of the first model where there is no base.
        tensor: name of the input embedding, for messages.

    Raises:
        MergeError: the vocabularies do not agree, or cannot be brought together in this way.
    """
    if mode is None:
        _check_rows(models, reference, tensor)
        _check_tokens(models, reference, models[reference].rows)
        return Alignment(models[reference].rows, (None,) * len(models), reference)
    if mode == "truncate":
        return _truncate(models, reference)
    if mode == "union":
        return _union(models, reference)
    labels = [model.label for model in models]
    if mode != "base" and mode not in labels:
        raise MergeError(
            f"vocab must be union, truncate, base or a model of the merge ({', '.join(labels)}), "
            f"got {mode!r}",
            code="invalid_value",
            key="vocab",
        )
    target = reference if mode == "base" else labels.index(mode)
    return _onto(models, target, _tokens(models[target]).ids, models[target].rows)


def _check_rows(models: Sequence[ModelVocab], reference: int, tensor: str) -> None:
    first, base = models[0], models[reference].tokens
    united = base is not None and base.fast and all(model.tokens for model in models)
    union = "--vocab union (all tokens) or " if united else ""
    for other in models[1:]:
        if other.rows != first.rows:
            fewest = min(model.rows for model in models)
            raise MergeError(
                f"{tensor} has {first.rows} rows in {first.label} but {other.rows} in {other.label}; use "
                f"{union}--vocab truncate (the first {fewest}, which all models have)",
                code="different_row_counts",
            )


def _check_tokens(models: Sequence[ModelVocab], reference: int, rows: int) -> None:
    """Refuse models in which one of the first `rows` rows means different tokens."""
    known: dict[int, tuple[str, str]] = {}
    order = [models[reference], *(model for i, model in enumerate(models) if i != reference)]
    checked: list[Mapping[str, int]] = []
    for model in order:
        if model.tokens is None or model.tokens.ids in checked:
            continue
        checked.append(model.tokens.ids)
        mine = {i: token for token, i in model.tokens.ids.items() if i < rows}
        differing = [i for i, token in mine.items() if i in known and known[i][0] != token]
        if differing:
            i = min(differing)
            token, label = known[i]
            raise MergeError(
                f"token {i} is {token!r} in {label} but {mine[i]!r} in {model.label}; use --vocab union (all "
                f"tokens) or --vocab {models[reference].label} (its tokens)",
                code="different_tokens",
                token_id=i,
            )
        known |= {i: (token, model.label) for i, token in mine.items() if i not in known}


def _truncate(models: Sequence[ModelVocab], reference: int) -> Alignment:
    rows = min(model.rows for model in models)
    _check_tokens(models, reference, rows)
    indexes = tuple(None if model.rows == rows else np.arange(rows, dtype=np.int64) for model in models)
    fewest = [i for i, model in enumerate(models) if model.rows == rows]
    # Of the models with the fewest rows, one with a tokenizer, and the reference rather than another.
    tokenizer = min(fewest, key=lambda i: (models[i].tokens is None, i != reference))
    return Alignment(rows, indexes, tokenizer)


def _union(models: Sequence[ModelVocab], reference: int) -> Alignment:
    """Return the reference's vocabulary with the added tokens of the other models behind it."""
    target = models[reference]
    table = _tokens(target)
    ids = dict(table.ids)
    added: list[AddedToken] = []
    for model in models:
        if model.tokens is None:
            continue
        missing = [(i, text) for text, i in model.tokens.ids.items() if text not in ids and i < model.rows]
        _check_added(missing, model, target)
        for _, text in sorted(missing):
            if not added:
                _check_extendable(target, table)
            ids[text] = len(ids)
            added.append({**model.tokens.added[text], "id": ids[text]})
    rows = max([max(ids.values(), default=-1) + 1, *(model.rows for model in models)])
    aligned = _onto(models, reference, ids, rows)
    return Alignment(rows, aligned.indexes, reference, tuple(added))


def _check_added(missing: list[tuple[int, str]], model: ModelVocab, target: ModelVocab) -> None:
    added = model.tokens.added if model.tokens else {}
    regular = sorted((i, text) for i, text in missing if text not in added)
    if regular:
        raise MergeError(
            f"the tokenizer of {model.label} was trained with other tokens than that of {target.label}, such "
            f"as {regular[0][1]!r}; use --vocab {target.label} (its tokens)",
            code="different_tokenizers",
        )


def _check_extendable(target: ModelVocab, table: TokenTable) -> None:
    """Refuse a tokenizer to which tokens cannot be appended under known ids."""
    if not table.fast:
        raise MergeError(
            f"{target.label} has no tokenizer.json for --vocab union to append to; save its tokenizer as a "
            f"fast one, or use --vocab {target.label}",
            code="tokenizer_not_fast",
        )
    # The tokenizers library numbers an appended token by the count of tokens, whatever id its file gives.
    if set(table.ids.values()) != set(range(len(table.ids))):
        raise MergeError(
            f"the {len(table.ids)} tokens of {target.label} do not have the ids 0 to {len(table.ids) - 1}, "
            f"so none can be appended; use --vocab {target.label}",
            code="token_ids_not_contiguous",
        )


def _tokens(model: ModelVocab) -> TokenTable:
    if model.tokens is None:
        raise MergeError(
            f"{model.label} has no tokenizer.json, vocab.json or vocab.txt; put it there, or use --vocab "
            "truncate",
            code="missing_tokenizer",
        )
    return model.tokens


def _onto(models: Sequence[ModelVocab], target: int, ids: Mapping[str, int], rows: int) -> Alignment:
    """Return the alignment to given tokens: rows without a token, padding, stay where they are."""
    named = {i: text for text, i in ids.items() if i < rows}
    return Alignment(rows, tuple(_index(model, models[target], named, rows) for model in models), target)


def _index(model: ModelVocab, target: ModelVocab, named: Mapping[int, str], rows: int) -> np.ndarray | None:
    """Return the model's row of each output row, or None where that is the row itself."""
    if model.tokens is None and model.rows != target.rows:
        raise MergeError(
            f"{model.label} has no tokenizer.json, vocab.json or vocab.txt and {model.rows} rows, "
            f"{target.label} {target.rows}; put its tokenizer into its folder, or use --vocab truncate",
            code="missing_tokenizer",
        )
    tokens = _tokens(model if model.tokens is not None else target).ids
    index = np.arange(rows, dtype=np.int64)
    index[model.rows :] = -1
    own = np.fromiter(tokens.values(), np.int64, len(tokens))
    index[own[own < rows]] = -1
    for row, text in named.items():
        source = tokens.get(text, -1)
        index[row] = source if source < model.rows else -1
    if model.rows == rows and np.array_equal(index, np.arange(rows)):
        return None
    return index
