"""Which examples a step takes, which of them a process takes, and how they are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlhf_data import PackedBatch, TokenSequence, pack

__all__ = ["cut", "epoch_order", "micro_batches"]


def epoch_order(num_examples: int, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
    """Order of the examples in an epoch; it depends on its arguments only."""
    if not shuffle:
        return list(range(num_examples))
    return torch.randperm(num_examples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def micro_batches(
    examples: Sequence[Any], sequences: Sequence[Sequence[TokenSequence]], budget: int | None
) -> Iterator[tuple[PackedBatch, list[Any]]]:
    """Cut examples by a token budget and pack each part.

    Args:
        examples: the examples.
        sequences: the token sequences of each; they are never cut apart.
        budget: tokens in one batch; a longer example is taken alone; None packs all into one.

    Yields:
        A batch and the examples in it; the batch's sequences are those of the examples, in their order.
    """
    for part in cut(sequences, budget):
        (batch,) = pack([sequence for i in part for sequence in sequences[i]])
        yield batch, [examples[i] for i in part]


def cut(examples: Sequence[Sequence[TokenSequence]], budget: int | None) -> list[list[int]]:
    """Indices of examples in parts of at most `budget` tokens; those with like beginnings come together.

    Prefixes are taken as shared within an example; what examples share among themselves comes on top.
    """
    lengths = [sum(len(sequence.input_ids) for sequence in sequences) for sequences in examples]
    if not examples:
        return []
    if budget is None or sum(lengths) <= budget:
        return [list(range(len(examples)))]
    parts: list[list[int]] = []
    used = 0
    for i in sorted(range(len(examples)), key=lambda i: list(examples[i][0].input_ids)):
        first = examples[i][0].input_ids
        cost = lengths[i] - sum(_shared(first, other.input_ids) for other in examples[i][1:])
        if not parts or used + cost > budget:
            parts.append([])
            used = 0
        parts[-1].append(i)
        used += cost
    return parts


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
