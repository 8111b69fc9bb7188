"""Settings of the constraint, of the controller that moves its multiplier, and of guards."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_data import BaseConfig
from rlhf_minmax.dual_ascent import DualRule, DualSettings
from rlhf_minmax.formats import MIN_EVIDENCE_WORDS


class ConstraintConfig(BaseConfig):
    """The monitor's truthfulness constraint, and how its λ moves."""

    threshold: float = Field(default=0.05, ge=0, le=1)
    """Violation that is tolerated, a share of the critiques."""
    rule: DualRule = "log"
    """How λ moves: see docs/minmax.md."""
    step_size: float = Field(default=0.5, gt=0)
    """Step size of λ."""
    smoothing: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest violation in its moving average."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps, in which λ is constant."""
    lambda_min: float = Field(default=0.05, ge=0)
    """Smallest λ."""
    lambda_max: float = Field(default=20.0, gt=0)
    """Largest λ."""
    proportional_gain: float = Field(default=1.0, ge=0)
    """P of rule pid, relative to step_size."""
    derivative_gain: float = Field(default=0.5, ge=0)
    """D of rule pid, relative to step_size; reacts only to a rising violation."""
    measure: Literal["balanced_accuracy", "accuracy", "brier"] = "balanced_accuracy"
    """Measure of violation: errors balanced over right and wrong answers, all errors, or the Brier score."""
    check_evidence: bool = True
    """Whether evidence that is not in the story, or contradicts the verdict, is a full violation."""
    min_evidence_words: int = Field(default=MIN_EVIDENCE_WORDS, ge=1)
    """Fewest words of a sentence, in a row, that are a quotation of a story from a file; a whole sentence
    may be shorter."""

    @model_validator(mode="after")
    def _bounds_fit_the_rule(self) -> Self:
        if self.lambda_min >= self.lambda_max:
            raise ValueError(f"lambda_min {self.lambda_min} must be below lambda_max {self.lambda_max}")
        if self.rule in ("multiplicative", "log") and self.lambda_min == 0:
            raise ValueError(f"rule {self.rule} cannot leave 0; set lambda_min above 0")
        if self.rule == "multiplicative" and self.step_size >= 1:
            raise ValueError(
                f"step_size {self.step_size}: rule multiplicative takes λ times 1 - step_size where the "
                "constraint holds; expected less than 1"
            )
        return self

    def dual_settings(self) -> DualSettings:
        """The controller's constants."""
        return DualSettings(
            rule=self.rule,
            threshold=self.threshold,
            step_size=self.step_size,
            smoothing=self.smoothing,
            minimum=self.lambda_min,
            maximum=self.lambda_max,
            proportional_gain=self.proportional_gain,
            derivative_gain=self.derivative_gain,
            warmup_steps=self.warmup_steps,
        )


class GuardConfig(BaseConfig):
    """When a player counts as collapsed, and what follows."""

    rollback: bool = True
    """Restore the last good state of a collapsed player, a monitor's with its λ; false only reports it."""
    patience: int = Field(default=3, ge=1)
    """Steps in a row in which the monitor must look collapsed."""
    one_sided_rate: float = Field(default=0.95, gt=0.5, le=1)
    """Share of right answers called wrong, or of wrong ones called right, that counts as collapsed."""
    zero_std_share: float = Field(default=0.9, gt=0, le=1)
    """Share of critique groups with equal rewards that counts as collapsed."""
    value_drop: float = Field(default=0.4, gt=0)
    """Fall of the policy's smoothed value below its best that counts as collapsed, in units of
    w_reward + w_judge."""
