"""Simple preference optimisation: preference pairs, without a reference."""

from __future__ import annotations

from torch import Tensor

from rlhf_algos.configs.offline import SimPOConfig
from rlhf_algos.losses import PreferenceLoss, simpo_loss
from rlhf_algos.offline.pairs import PairTrainer, Sides


class SimPOTrainer(PairTrainer):
    """Trains a policy on preference pairs by SimPO; the loss is the mean over a step's pairs.

    A reward is beta times the mean log-probability of a completion's tokens.  Metrics: those of
    `PairTrainer`; `nll_loss` is that of the chosen completions.

    See `PairTrainer` for the arguments.
    """

    config: SimPOConfig

    @property
    def nll_weight(self) -> float:
        """`cpo_alpha`."""
        return self.config.cpo_alpha

    def pair_loss(self, sides: Sides) -> tuple[PreferenceLoss, dict[str, Tensor]]:
        """SimPO's loss of the pairs."""
        result = simpo_loss(
            sides.chosen_logps,
            sides.rejected_logps,
            lengths=sides.lengths,
            beta=self.config.beta,
            simpo_gamma=self.config.simpo_gamma,
            label_smoothing=self.config.label_smoothing,
        )
        return result, {}
