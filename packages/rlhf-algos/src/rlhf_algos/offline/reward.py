"""Training a reward model, or an ensemble of them, on preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_algos.configs.offline import RewardConfig
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.losses import bradley_terry, pair_calibration
from rlhf_algos.offline.calibrated import CalibratedTrainer
from rlhf_algos.offline.pairs import PairExamples, PairLike
from rlhf_data import PackedBatch
from rlhf_data import PreferencePair as PreferencePair


class RewardTrainer(PairExamples, CalibratedTrainer[PairLike]):
    """Trains a scalar model on preference pairs by the Bradley-Terry loss, the mean over the pairs of a step.

    Metrics: `accuracy` (pairs with the chosen reward above the rejected one), `margin` (mean of their
    difference), `min_reward`, `mean_reward`, `max_reward`; evaluation adds `calibration`, the expected
    calibration error of sigmoid(|margin|) as the probability that the pair is ranked rightly.

    Of an ensemble every member learns from every pair; the loss is the mean over the members, the metrics
    are those of their mean reward, and there are `member_loss/<k>` of each member and `disagreement`, the
    members' standard deviation, mean over the completions.

    Args:
        model: `rlhf_models.RewardModel`, where `model(batch)` gives (Q,) rewards, or
            `rlhf_models.RewardEnsemble`, where it gives (K, Q).
        config: the settings.
        examples: (chosen, rejected) or (chosen, rejected, margin).
        **options: see `BaseTrainer`.

    Raises:
        UserError: no examples.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")
    config: RewardConfig

    def loss(self, batch: PackedBatch, examples: Sequence[PairLike]) -> LossOutput:
        """Bradley-Terry loss with each pair's margin."""
        rewards = self.forward(batch).float()
        members = rewards.view(-1, batch.num_sequences)
        margins = torch.tensor([_margin(pair) for pair in examples], device=rewards.device)
        results = [
            bradley_terry(
                *member.view(-1, 2).unbind(1),
                margins=margins,
                center_coefficient=self.config.center_rewards_coefficient or 0.0,
            )
            for member in members
        ]
        losses = torch.stack([result.loss for result in results])
        sums, mean = {}, members.detach().mean(0)
        if rewards.ndim == 2:
            sums = {f"member_loss/{k}": loss for k, loss in enumerate(losses)}
            sums["disagreement"] = members.detach().std(0, correction=0).sum() / 2
        return LossOutput(
            losses.mean(),
            sums=sums | self._sums(*mean.view(-1, 2).unbind(1)),
            lows={"min_reward": mean.min()},
            highs={"max_reward": mean.max()},
        )

    def _sums(self, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        sums = {
            "accuracy": (chosen > rejected).sum(),
            "margin": (chosen - rejected).sum(),
            "mean_reward": (chosen + rejected).sum() / 2,
        }
        return sums | self.calibration_sums(lambda: pair_calibration(chosen, rejected))


def _margin(pair: Any) -> float:
    return PreferencePair(*pair).margin


RewardModelTrainer = RewardTrainer
"""Alias of `RewardTrainer`."""
