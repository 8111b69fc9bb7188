"""Loss functions: tensors and floats in, sums out.

Letters: `M` scored tokens of a packed batch (or steps of its solutions), `Q` sequences, `P` preference pairs.
There is no padding: tensors are flat vectors, those of tokens in any order.  Every loss is a **sum** over its
entries, and so is every scalar statistic returned beside it; the caller divides once by the count of the
whole optimizer step (all micro-batches, all processes), which makes the gradient independent of how the step
was cut.  Log-probabilities of a sequence are sums over its tokens.
"""

from __future__ import annotations

from rlhf_algos.losses.calibration import calibration_error, pair_calibration
from rlhf_algos.losses.importance import ImportanceMode, ImportanceWeights, importance_weights
from rlhf_algos.losses.kl import KL_ESTIMATORS, KLEstimator, corrected_kl, kl_k1, kl_k2, kl_k3
from rlhf_algos.losses.kto import KTOLoss, kl_ema, kto_kl, kto_loss
from rlhf_algos.losses.policy import (
    PolicyLoss,
    RatioStatistics,
    ValueLoss,
    clipped_policy_loss,
    policy_loss,
    policy_ratio,
    ratio_statistics,
    value_loss,
)
from rlhf_algos.losses.preference import DPOLossType, PreferenceLoss, chosen_nll, dpo_loss, simpo_loss
from rlhf_algos.losses.process import StepAggregation, aggregate_steps, outcome_ranking
from rlhf_algos.losses.rewards import BinaryLoss, PairLoss, binary_cross_entropy, bradley_terry
from rlhf_algos.losses.surrogates import (
    LOSS_TYPES,
    NORMALISERS,
    SURROGATES,
    LossType,
    SurrogateSettings,
    TokenWeights,
    token_weights,
)
from rlhf_algos.losses.tokens import TokenLoss, next_token_loss

__all__ = [
    "KL_ESTIMATORS",
    "LOSS_TYPES",
    "NORMALISERS",
    "SURROGATES",
    "BinaryLoss",
    "DPOLossType",
    "ImportanceMode",
    "ImportanceWeights",
    "KLEstimator",
    "KTOLoss",
    "LossType",
    "PairLoss",
    "PolicyLoss",
    "PreferenceLoss",
    "RatioStatistics",
    "StepAggregation",
    "SurrogateSettings",
    "TokenLoss",
    "TokenWeights",
    "ValueLoss",
    "aggregate_steps",
    "binary_cross_entropy",
    "bradley_terry",
    "calibration_error",
    "chosen_nll",
    "clipped_policy_loss",
    "corrected_kl",
    "dpo_loss",
    "importance_weights",
    "kl_ema",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kto_kl",
    "kto_loss",
    "next_token_loss",
    "outcome_ranking",
    "pair_calibration",
    "policy_loss",
    "policy_ratio",
    "ratio_statistics",
    "simpo_loss",
    "token_weights",
    "value_loss",
]
