"""Odds ratio preference optimisation: preference pairs and likelihood at once, without a reference."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from rlhf_algos.configs.trainer import LanguageModelConfig
from rlhf_algos.losses import PreferenceLoss, orpo_loss
from rlhf_algos.offline.pairs import PairTrainer, Sides


class ORPOConfig(LanguageModelConfig):
    """Settings of odds ratio preference optimisation."""

    beta: float = Field(default=0.1, gt=0)
    """Weight of the odds ratio relative to the likelihood, the paper's lambda."""


class ORPOTrainer(PairTrainer):
    """Trains a policy on preference pairs by ORPO (https://arxiv.org/abs/2403.07691, eq. 6).

    The loss is the negative log-likelihood of the chosen completions with their prompts, a mean over a step's
    tokens, and beta times the odds ratio loss, a mean over its pairs.  A reward is beta times the mean
    log-probability of a completion's tokens.  Metrics: those of `PairTrainer`; `log_odds_chosen`, the mean
    log odds ratio, and `log_odds_ratio`, the mean of the log of its sigmoid.

    See `PairTrainer` for the arguments.
    """

    learns_prompt: ClassVar[bool] = True
    config: ORPOConfig

    def pair_loss(self, sides: Sides) -> tuple[PreferenceLoss, dict[str, Tensor]]:
        """The weighted odds ratio loss of the pairs."""
        result = orpo_loss(
            sides.chosen_logps, sides.rejected_logps, lengths=sides.lengths, beta=self.config.beta
        )
        log_odds_ratio = F.logsigmoid(result.log_odds).sum()
        return result, {"log_odds_ratio": log_odds_ratio, "log_odds_chosen": result.log_odds.sum()}
