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


def side_metrics(
    scores: TokenLogps, chosen_tokens: Tensor, rejected_tokens: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Entropy of both sides' tokens and mean logits of each side's, as sums and counts.

    Args:
        scores: scored with statistics.
        chosen_tokens: (M,) bool, which tokens belong to chosen (desirable) completions.
        rejected_tokens: (M,) bool, which belong to rejected (undesirable) ones.
    """
    assert scores.entropy is not None and scores.mean_logits is not None
    return {
        "logits/chosen": mean_where(scores.mean_logits, chosen_tokens),
        "logits/rejected": mean_where(scores.mean_logits, rejected_tokens),
        "entropy": mean_where(scores.entropy, chosen_tokens | rejected_tokens),
    }
