"""Scores of tokens under a language model: surprisal, and how well they explain a question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlhf_data import TokenSequence, pack
from rlhf_models.language_model.dropout import evaluating
from rlhf_models.language_model.logps import token_logps


def surprisals(
    model: Any, texts: Sequence[Sequence[int]], *, start: int | None, window: int, batch_tokens: int | None
) -> list[np.ndarray]:
    """-log p(x_t | x_<t) in nats of every token of some texts (Selective Context, arXiv:2310.06201, eq. 2).

    A text longer than the window is read in windows, each by itself. A token that nothing comes before has
    the surprisal ln V of no knowledge.

    Args:
        model: a causal LM, or a PeftModel around one.
        texts: token ids of each text.
        start: the start token, which is put before each window; None for none.
        window: tokens that are read at once, the start token included.
        batch_tokens: tokens of one forward pass; None for all at once.

    Returns:
        (T,) of each text.
    """
    head = [] if start is None else [start]
    size = window - len(head)
    pieces = [[text[i : i + size] for i in range(0, len(text), size)] for text in texts]
    found = iter(_logps(model, [(head, piece) for parts in pieces for piece in parts], batch_tokens))
    return [-np.concatenate([next(found) for _ in parts]) for parts in pieces]


def question_likelihoods(
    model: Any,
    pieces: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]],
    *,
    start: int | None,
    batch_tokens: int | None,
) -> np.ndarray:
    """Mean log p(question | piece) over the question's tokens (LongLLMLingua, arXiv:2310.06839, eq. 2).

    Its exponential is one over the question's perplexity. Equal pieces are computed once, and so are the
    common beginnings of pieces, also when they come with several questions.

    Args:
        model: a causal LM, or a PeftModel around one.
        pieces: token ids of K pieces of text, none empty.
        questions: (K) token ids of the question to each piece, none empty.
        start: see `surprisals`.
        batch_tokens: see `surprisals`.

    Returns:
        (K,) <= 0.
    """
    head = [] if start is None else [start]
    pairs = [([*head, *piece], question) for piece, question in zip(pieces, questions, strict=True)]
    return np.array([logps.mean() for logps in _logps(model, pairs, batch_tokens)])


def contrasts(
    model: Any,
    pieces: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]],
    *,
    start: int | None,
    batch_tokens: int | None,
) -> list[np.ndarray]:
    """Log p(x_t | question, x_<t) - log p(x_t | x_<t) of every token of K pieces, x_<t within its piece.

    The contrastive perplexity of LongLLMLingua (arXiv:2310.06839, eq. 3), of pieces by themselves: all
    pieces are branches of their question, which is computed once. The arguments are those of
    `question_likelihoods`.

    Returns:
        (t,) of each piece.
    """
    head = [] if start is None else [start]
    given = [([*head, *question], piece) for piece, question in zip(pieces, questions, strict=True)]
    scores = _logps(model, [*given, *((head, piece) for piece in pieces)], batch_tokens)
    return [a - b for a, b in zip(scores[: len(given)], scores[len(given) :], strict=True)]


@torch.no_grad()
def _logps(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_tokens: int | None
) -> list[np.ndarray]:
    """Log p(ending | beginning), token by token, of pairs (beginning, ending) of token ids."""
    sequences, owner, numbers = [], [], {}
    for beginning, ending in pairs:
        key = (tuple(beginning), tuple(ending))
        if key not in numbers:  # repeated sentences are frequent, and packing them anew takes time
            numbers[key] = len(sequences)
            sequences.append(TokenSequence([*beginning, *ending], len(beginning)))
        owner.append(numbers[key])
    found: list[Any] = [None] * len(sequences)
    with evaluating(model):
        for batch in pack(sequences, batch_tokens):
            logps = token_logps(model, batch.to(model.device)).logps.cpu().numpy()
            cuts = np.cumsum(batch.sequence_lengths().numpy())[:-1]
            for number, part in zip(batch.sequence_ids.tolist(), np.split(logps, cuts), strict=True):
                unknown = len(sequences[number].input_ids) - sequences[number].score_from - len(part)
                none = np.full(unknown, -math.log(model.config.get_text_config().vocab_size))
                found[number] = np.concatenate([none, part])
    return [found[number] for number in owner]
