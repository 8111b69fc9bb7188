"""Training a reward model on preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field

from rlhf_algos.config import TrainerConfig
from rlhf_algos.losses import bradley_terry
from rlhf_algos.scalar import sequence_scores
from rlhf_algos.trainer import BaseTrainer, LossOutput
from rlhf_data import PackedBatch, TokenSequence

__all__ = ["PreferencePair", "RewardConfig", "RewardTrainer"]


class PreferencePair(NamedTuple):
    """Two completions of one prompt, each with its prompt in front; a plain tuple serves as well."""

    chosen: TokenSequence
    rejected: TokenSequence
    margin: float = 0.0
    """By how much the chosen one is better, in units of reward."""


PairLike = PreferencePair | tuple[TokenSequence, TokenSequence] | tuple[TokenSequence, TokenSequence, float]


class RewardConfig(TrainerConfig):
    """Settings of reward modelling."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate of AdamW."""
    center_rewards_coefficient: float | None = Field(default=None, ge=0)
    """Weight of the squared sum of a pair's rewards, which ties their mean to zero; null for none."""


class RewardTrainer(BaseTrainer[PreferencePair]):
    """Trains a scalar model on preference pairs by the Bradley-Terry loss, the mean over the pairs of a step.

    Metrics: `accuracy` (pairs with the chosen reward above the rejected one), `margin` (mean of their
    difference), `min_reward`, `mean_reward`, `max_reward`.

    Args:
        model: `rlhf_models.RewardModel`: `model(batch)` gives (Q,) rewards.
        config: the settings.
        examples: (chosen, rejected) or (chosen, rejected, margin).
        **options: see `BaseTrainer`.

    Raises:
        UserError: no examples.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")
    config: RewardConfig

    def __init__(
        self,
        model: Any,
        config: RewardConfig,
        examples: Sequence[PairLike],
        *,
        eval_examples: Sequence[PairLike] = (),
        **options: Any,
    ) -> None:
        super().__init__(model, config, _pairs(examples), eval_examples=_pairs(eval_examples), **options)

    def sequences(self, example: PreferencePair) -> Sequence[TokenSequence]:
        """Chosen, then rejected; the prompt they share is computed once."""
        return (example.chosen, example.rejected)

    def count(self, batch: PackedBatch) -> int:
        """The pairs."""
        return batch.num_sequences // 2

    def loss(self, batch: PackedBatch, examples: Sequence[PreferencePair]) -> LossOutput:
        """Bradley-Terry loss with each pair's margin."""
        rewards = sequence_scores(self.model, batch)
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        result = bradley_terry(
            chosen,
            rejected,
            margins=torch.tensor([pair.margin for pair in examples], device=rewards.device),
            center_coefficient=self.config.center_rewards_coefficient or 0.0,
        )
        rewards = rewards.detach()
        return LossOutput(
            result.loss,
            sums={"accuracy": result.correct, "margin": result.margin, "mean_reward": rewards.sum() / 2},
            lows={"min_reward": rewards.min()},
            highs={"max_reward": rewards.max()},
        )


def _pairs(rows: Sequence[Any]) -> list[PreferencePair]:
    return [PreferencePair(*row) for row in rows]
