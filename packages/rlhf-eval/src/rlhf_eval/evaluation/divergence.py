"""Divergence of a policy from its reference along its completions, exact over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rlhf_data import PackedBatch, TokenSequence, UserError, pack

_BYTES = 1 << 28
"""Maximum size of one model's distributions in a batch, unless a single sequence needs more."""


class Divergence(NamedTuple):
    """Of one completion; sums over its tokens, in nats.

    Attributes:
        tokens: how many there are.
        kl: Σ_t KL(π(· | x, y_<t) ‖ π_ref(· | x, y_<t)), exact over the vocabulary.
        k1: Σ_t log π(y_t) − log π_ref(y_t); its expectation over completions of π is their KL.
        k3: Σ_t r − 1 − log r with r = π_ref(y_t) / π(y_t) (Schulman 2020, "Approximating KL divergence").
        entropy: Σ_t of the policy's entropy.
    """

    tokens: int
    kl: float
    k1: float
    k3: float
    entropy: float


def check_same_tokens(tokenizer: Any, reference: Any, names: tuple[str, str]) -> None:
    """Refuse a policy and a reference whose distributions are over different tokens."""
    if tokenizer.get_vocab() != reference.get_vocab():
        raise UserError(
            f"{names[0]} and its reference {names[1]} have different tokenizers, so that no KL is defined "
            "between them; give --no-kl to evaluate without it"
        )


def divergences(
    policy: Any,
    reference: Any,
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int | None = None,
    done: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Divergence]]:
    """The divergence of each completion, in any order, as it is computed.

    Each sequence is a prompt with a completion, whose tokens are scored; `done` is called with the number of
    sequences of each batch.

    Yields:
        The number of a sequence, and its divergence.
    """
    from rlhf_models import token_distributions

    vocabulary = policy.get_output_embeddings().weight.shape[0]
    budget = max(1, _BYTES // (4 * vocabulary))
    for batch in pack(list(sequences), min(budget, max_tokens or budget)):
        ours, theirs = (
            token_distributions(model, batch.to(model.device)).distributions for model in (policy, reference)
        )
        assert ours is not None and theirs is not None
        yield from _of_batch(batch, ours, theirs.to(ours.device))
        if done is not None:
            done(len(batch.sequence_ids))


def sequence_logps(
    model: Any, sequences: Sequence[TokenSequence], *, max_tokens: int | None = None
) -> torch.Tensor:
    """Σ_t log π(y_t | x, y_<t) (n,) of each completion, fp64, on the CPU."""
    from rlhf_models import token_logps

    found = torch.zeros(len(sequences), dtype=torch.float64)
    with torch.no_grad():
        for batch in pack(list(sequences), max_tokens):
            logps = token_logps(model, batch.to(model.device)).logps
            found.index_add_(0, batch.sequence_ids[batch.score_sequence].cpu(), logps.double().cpu())
    return found


def _of_batch(
    batch: PackedBatch, ours: torch.Tensor, theirs: torch.Tensor
) -> Iterator[tuple[int, Divergence]]:
    """`ours` and `theirs` are log π (M, V) in the place of the batch's M targets."""
    probabilities = ours.exp()
    targets = batch.score_targets.to(ours.device)[:, None]
    log_ratio = (ours - theirs).gather(1, targets)[:, 0].double()
    columns = {
        "tokens": torch.ones_like(log_ratio),
        "kl": (probabilities * (ours - theirs)).sum(-1).double(),
        "k1": log_ratio,
        "k3": torch.expm1(-log_ratio) + log_ratio,
        "entropy": -(probabilities * ours).sum(-1).double(),
    }
    places = batch.score_sequence.to(ours.device)
    sums = {
        name: torch.zeros(len(batch.sequence_ids), dtype=torch.float64, device=ours.device)
        .index_add_(0, places, values)
        .tolist()
        for name, values in columns.items()
    }
    for place, number in enumerate(batch.sequence_ids.tolist()):
        row = {name: values[place] for name, values in sums.items()}
        yield number, Divergence(int(row.pop("tokens")), **row)
