"""Settings of the offline methods; the names and defaults are those of TRL, where it has them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_algos.configs.trainer import LanguageModelConfig, TrainerConfig


class SFTConfig(LanguageModelConfig):
    """Settings of supervised fine-tuning."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate of AdamW."""
    max_length: int | None = Field(default=1024, ge=2)
    """Tokens kept of a row, from its start; null keeps all."""
    disable_dropout: bool = False
    """Disable dropout, including the adapters'."""
    assistant_only_loss: bool = False
    """In conversations, learn only the assistant's turns."""


class RewardConfig(TrainerConfig):
    """Settings of reward modelling."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate of AdamW."""
    max_length: int | None = Field(default=1024, ge=2)
    """Maximum prompt plus completion in tokens; longer rows are left out; null keeps all."""
    center_rewards_coefficient: float | None = Field(default=None, ge=0)
    """Weight of the squared sum of a pair's rewards, which keeps their mean near 0; null for none."""
    disable_dropout: bool = True
    """Disable dropout, including the adapters'."""


class JudgeConfig(TrainerConfig):
    """Settings of training a judge on labelled texts."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate of AdamW."""
    max_length: int | None = Field(default=1024, ge=2)
    """Tokens kept of prompt plus completion; null keeps all."""
    disable_dropout: bool = True
    """Disable dropout, including the adapters'."""


ScalarConfig = JudgeConfig
"""Alias of `JudgeConfig`."""


class PRMConfig(TrainerConfig):
    """Settings of process reward modelling."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""
    max_length: int | None = Field(default=1024, ge=2)
    """Tokens kept of a row, from its start; steps that end beyond are left out; null keeps all."""
    step_separator: str = Field(default="\n", min_length=1)
    """Text that ends every step; a step is scored at its last token."""
    aggregate: Literal["min", "mean", "last", "product"] = "min"
    """How step scores make a solution's score: minimum, mean, last or product."""
    step_weight: float = Field(default=1.0, ge=0)
    """Weight of the cross-entropy of step labels, a mean over the labelled steps."""
    outcome_weight: float = Field(default=1.0, ge=0)
    """Weight of the ranking loss of pairs of solutions, a mean over the pairs."""
    disable_dropout: bool = True
    """Disable dropout, including the adapters'."""


class ReferenceConfig(LanguageModelConfig):
    """Settings of training against a reference policy."""

    precompute_ref_log_probs: bool = False
    """Compute the reference's log-probs once, before training, and keep them on disk."""
    disable_dropout: bool = True
    """Disable dropout, including the adapters', so that policy and reference differ by training alone."""

    @property
    def needs_reference(self) -> bool:
        """Unless its log-probs are computed beforehand."""
        return not self.precompute_ref_log_probs


class DPOConfig(ReferenceConfig):
    """Settings of direct preference optimisation."""

    beta: float = Field(default=0.1, gt=0)
    """How closely the policy stays to its reference; higher is closer."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    """sigmoid is DPO's own loss, hinge that of SLiC, ipo IPO's; robust allows for wrong labels."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a pair's labels are swapped; for sigmoid and robust."""

    @model_validator(mode="after")
    def _smoothing_has_a_use(self) -> Self:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(
                f"label_smoothing has no meaning with loss_type {self.loss_type}; set it to 0, or take "
                "sigmoid or robust"
            )
        return self


class SimPOConfig(LanguageModelConfig):
    """Settings of simple preference optimisation."""

    beta: float = Field(default=2.0, gt=0)
    """Scale of the rewards, which are beta times a completion's mean log-probability per token."""
    simpo_gamma: float = Field(default=1.0, ge=0)
    """Margin by which the chosen reward is to exceed the rejected one, in units of reward."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a pair's labels are swapped."""
    cpo_alpha: float = Field(default=0.0, ge=0)
    """Weight of the chosen completions' negative log-likelihood per token; above 0 this is CPO-SimPO."""


class KTOConfig(ReferenceConfig):
    """Settings of Kahneman-Tversky optimisation."""

    beta: float = Field(default=0.1, gt=0)
    """How closely the policy stays to its reference; higher is closer."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of the desirable completions' loss; raise it if they are fewer."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of the undesirable completions' loss."""
    kl_estimate: Literal["mismatched", "ema"] = "mismatched"
    """Estimate of the KL: from prompts with other rows' completions, or a moving average over the steps."""
    kl_ema_decay: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the moving average per step."""


RewardModelConfig = RewardConfig
"""Alias of `RewardConfig`."""
