"""What the trainers on preference pairs share: both sides of a batch, and TRL's metrics of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.engine.sequence_sums import mean_where, sequence_lengths, sequence_sums, side_metrics
from rlhf_algos.losses import PreferenceLoss
from rlhf_data import PackedBatch, PreferencePair, TokenSequence
from rlhf_models import TokenLogps


@dataclass(frozen=True)
class Sides:
    """Summed log-probs and lengths of the P pairs of a batch, each (P,)."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor

    @classmethod
    def of(cls, logps: Tensor, batch: PackedBatch) -> Sides:
        """Both sides of a batch whose sequences are chosen, rejected, chosen, rejected, ...

        Args:
            logps: (M,) of the batch's scored tokens.
            batch: the batch.
        """
        chosen, rejected = sequence_sums(logps, batch).view(-1, 2).unbind(1)
        return cls(chosen, rejected, *sequence_lengths(batch).view(-1, 2).unbind(1))

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """Tokens of the chosen and of the rejected completions."""
        return self.chosen_lengths, self.rejected_lengths


def pair_sequences(pair: PreferencePair) -> tuple[TokenSequence, TokenSequence]:
    """Chosen, then rejected; the prompt they share is computed once."""
    return pair[0], pair[1]


def pair_output(
    loss: Tensor,
    result: PreferenceLoss,
    *,
    logps: tuple[Tensor, Tensor],
    scores: TokenLogps,
    batch: PackedBatch,
) -> LossOutput:
    """Loss and metrics of a batch of pairs, under TRL's names.

    Args:
        loss: sum over the pairs, with gradient.
        result: whose rewards are reported.
        logps: (P,) and (P,) log-probs that are reported, chosen and rejected.
        scores: of the batch's tokens, with statistics.
        batch: its sequences are chosen, rejected, chosen, rejected, ...
    """
    chosen, rejected = result.chosen_rewards, result.rejected_rewards
    chosen_tokens = batch.score_sequence % 2 == 0
    assert scores.correct is not None
    return LossOutput(
        loss,
        sums={
            "rewards/chosen": chosen.sum(),
            "rewards/rejected": rejected.sum(),
            "rewards/accuracies": (chosen > rejected).sum(),
            "rewards/margins": (chosen - rejected).sum(),
            "logps/chosen": logps[0].sum(),
            "logps/rejected": logps[1].sum(),
        },
        means={
            **side_metrics(scores, chosen_tokens),
            "mean_token_accuracy": mean_where(scores.correct.float(), chosen_tokens),
        },
    )
