"""From scored tokens to sequences: sums per sequence, and the metrics of chosen and rejected ones."""

from __future__ import annotations

from torch import Tensor

from rlhf_data import PackedBatch
from rlhf_models import TokenLogps


def sequence_sums(values: Tensor, batch: PackedBatch) -> Tensor:
    """Sums (Q,) over the scored tokens of each sequence of values (M,)."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.score_sequence, values)


def sequence_lengths(batch: PackedBatch) -> Tensor:
    """Scored tokens (Q,) of each sequence."""
    return batch.score_sequence.bincount(minlength=batch.num_sequences)


def mean_where(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count of the values at which `chosen` (bool, same shape) is true."""
    return values.masked_fill(~chosen, 0).sum(), chosen.sum()


def side_metrics(scores: TokenLogps, chosen_tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Entropy of all tokens and mean logits of both sides' tokens, as sums and counts.

    Args:
        scores: scored with statistics.
        chosen_tokens: (M,) bool, which tokens belong to chosen (desirable) completions.
    """
    assert scores.entropy is not None and scores.mean_logits is not None
    return {
        "logits/chosen": mean_where(scores.mean_logits, chosen_tokens),
        "logits/rejected": mean_where(scores.mean_logits, ~chosen_tokens),
        "entropy": mean_where(scores.entropy, chosen_tokens | ~chosen_tokens),
    }
