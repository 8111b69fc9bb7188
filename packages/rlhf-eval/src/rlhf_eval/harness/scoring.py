"""Log-probabilities of continuations, all contexts in one forest of shared prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rlhf_data import PackedBatch, TokenSequence, pack
from rlhf_models import token_logps


class Continuation(NamedTuple):
    """Score of a continuation.

    Attributes:
        logp: Σ_t log π(y_t | x, y_<t) in nats.
        greedy: whether each of its tokens is the likeliest one.
    """

    logp: float
    greedy: bool


@torch.no_grad()
def score_continuations(
    model: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_tokens: int,
    done: Callable[[int], object] | None = None,
) -> list[Continuation]:
    """Score continuations y of contexts x, both token ids.

    Examples before a question, a question before its choices: whatever contexts share, at any
    depth, is computed once for each `max_tokens`. The last token of a continuation is predicted but never
    read, so that choices of one token cost nothing beyond their context.

    A continuation has at least one token; `max_tokens` counts shared ones once; `done` is called with the
    number of pairs of each pass.
    """
    if not pairs:
        return []
    read = [(*context, *continuation)[:-1] for context, continuation in pairs]
    found: dict[int, Continuation] = {}
    for batch in pack([TokenSequence(ids, len(ids)) for ids in read], max_tokens):
        numbers = batch.sequence_ids.tolist()
        scores = token_logps(
            model, _scored(batch, [pairs[i][1] for i in numbers]).to(model.device), with_stats=True
        )
        assert scores.correct is not None
        lengths = [len(pairs[i][1]) for i in numbers]
        logps, correct = scores.logps.double().cpu().split(lengths), scores.correct.cpu().split(lengths)
        for number, logp, right in zip(numbers, logps, correct, strict=True):
            found[number] = Continuation(float(logp.sum()), bool(right.all()))
        if done is not None:
            done(len(numbers))
    return [found[i] for i in range(len(pairs))]


def _scored(batch: PackedBatch, continuations: Sequence[Sequence[int]]) -> PackedBatch:
    """The batch with these continuations as targets, which end one token after what the stream holds."""
    positions = [batch.path(q)[-len(ids) :] for q, ids in enumerate(continuations)]
    lengths = torch.tensor([len(ids) for ids in continuations])
    return replace(
        batch,
        score_positions=torch.cat(positions),
        score_targets=torch.tensor([token for ids in continuations for token in ids]),
        score_sequence=torch.arange(len(continuations)).repeat_interleave(lengths),
    )
