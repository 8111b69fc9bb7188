"""Group-relative policy optimisation: completions of a prompt are compared with one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf_algos.advantages import group_advantages, overlong_penalty
from rlhf_algos.configs.online import GRPOConfig
from rlhf_algos.engine.loss_output import LossOutput, mean_where
from rlhf_algos.losses import (
    KL_ESTIMATORS,
    SURROGATES,
    SurrogateSettings,
    corrected_kl,
    policy_loss,
    ratio_statistics,
    token_weights,
)
from rlhf_algos.online.base import OnlineTrainer
from rlhf_algos.online.importance_correction import (
    SamplingCorrection,
    sampling_correction,
    with_correction,
)
from rlhf_algos.online.rollouts import Completion, StepTable, flat, spread
from rlhf_data import PackedBatch


class GRPOTrainer(OnlineTrainer):
    """Trains a policy by GRPO (https://arxiv.org/abs/2402.03300) and its relatives.

    `loss_type`, `importance_sampling_level`, `advantage_estimator` and `scale_rewards` make it Dr. GRPO,
    DAPO, CISPO, SAPO, GSPO or RLOO.  Metrics: those of `rollout_metrics`; `kl` to the reference (nats per
    token, where `beta` is set), `entropy`, `approx_kl` (to the sampling policy), `clip_ratio/low_mean`,
    `low_min`, `high_mean`, `high_max`, `region_mean`; those of `SamplingCorrection` with vLLM and with an
    engine that samples ahead.

    See `OnlineTrainer` for the arguments.
    """

    compares_groups = True
    config: GRPOConfig

    def compute_advantages(self, completions: Sequence[Completion], table: StepTable) -> dict[str, float]:
        """Advantages within the groups of the whole step, and what each token counts."""
        config, metrics = self.config, {}
        self.compute_known_logps(completions, reference=config.needs_reference, policy=self._knows_old_logps)
        rewards = table.total
        if config.overlong_buffer:
            penalty = overlong_penalty(
                table.lengths, max_length=config.max_completion_length, buffer=config.overlong_buffer
            )
            rewards = rewards + penalty
            metrics["completions/overlong_penalty"] = float(penalty.mean())
        advantages = group_advantages(
            rewards,
            table.groups,
            baseline=config.advantage_estimator,
            scale_rewards=config.scale_rewards,
        )
        weights = token_weights(
            config.loss_type,
            torch.tensor([self._counted(each) for each in completions]),
            max_completion_length=config.max_completion_length,
        ).weights.tolist()
        metrics["advantage_abs_mean"] = float(advantages.abs().mean())
        for completion, weight in zip(completions, weights, strict=True):
            completion.tokens["advantages"] = advantages[completion.index].expand(completion.length)
            completion.weight = weight
        return metrics

    def num_loss_terms(self, batch: PackedBatch, examples: Sequence[Any]) -> int:
        """Divisor of the loss type: completions, their tokens, or completions times the longest length."""
        lengths = torch.tensor([self._counted(each) for each in examples])
        longest = self.config.max_completion_length
        return int(token_weights(self.config.loss_type, lengths, max_completion_length=longest).normaliser)

    def loss(self, batch: PackedBatch, examples: Sequence[Any]) -> LossOutput:
        """The surrogate's loss with its KL and entropy terms, and TRL's metrics."""
        config = self.config
        scores = self.policy_scores(
            batch,
            temperature=config.temperature,
            with_entropy=config.entropy_coef > 0,
            with_stats=config.entropy_coef == 0,
        )
        logps, entropy = scores.logps, scores.entropy  # (M,) each, as all tensors below
        old_logps = self._old_logps(logps, examples)
        advantages = flat("advantages", examples, self.device)
        weights = spread([each.weight for each in examples], examples, self.device)
        correction = self._correction(old_logps, batch, examples)
        sequence = batch.score_sequence if config.importance_sampling_level == "sequence" else None
        result = policy_loss(
            logps,
            old_logps,
            advantages if correction is None else advantages * correction.weights,
            surrogate=SURROGATES[config.loss_type],
            settings=self._surrogate_settings(),
            weights=weights,
            sequence=sequence,
        )
        loss, counted = result.loss, weights > 0
        means = {"entropy": mean_where(entropy.detach(), counted)}
        if config.beta:
            kl = self._kl(logps, old_logps, examples, sequence)
            loss = loss + config.beta * (weights * kl).sum()
            means["kl"] = mean_where(kl.detach(), counted)
        if config.entropy_coef:
            # The mean over tokens, whatever the loss type divides by.
            loss = loss - config.entropy_coef * self.terms_per_token * entropy[counted].sum()
        means["approx_kl"] = (result.approx_kl, weights.sum())
        output = self._with_clip_ratios(
            LossOutput(loss, means=means),
            logps[counted],
            old_logps[counted],
            advantages[counted],
            batch.score_sequence[counted],
        )
        output = with_correction(output, correction)
        return self.balanced(output, scores, self.num_loss_terms(batch, examples))

    @property
    def _knows_old_logps(self) -> bool:
        """Whether old log-probs are known before the update.

        Otherwise the step has a single update, whose own log-probs are the old ones: computing them
        beforehand would take another forward pass with the same weights.
        """
        return self.engine_is_exact or self.config.passes * self.config.mini_batches > 1

    def _old_logps(self, logps: Tensor, examples: Sequence[Any]) -> Tensor:
        """Log-probs (M,) that the ratio is taken to: those of sampling, or the update's own."""
        return flat("old_logps", examples, self.device) if self._knows_old_logps else logps.detach()

    def _correction(
        self, old_logps: Tensor, batch: PackedBatch, examples: Sequence[Any]
    ) -> SamplingCorrection | None:
        """Importance correction for the engine's log-probs; None where engine and trainer agree."""
        if not self.corrects_sampling:
            return None
        sampled = flat("sampling_logps", examples, self.device)
        return sampling_correction(old_logps, sampled, batch.score_sequence, self.config)

    def _surrogate_settings(self) -> SurrogateSettings:
        low, high = self.config.clip_bounds
        return SurrogateSettings(
            clip_low=low,
            clip_high=high,
            delta=self.config.delta,
            temperature_pos=self.config.sapo_temperature_pos,
            temperature_neg=self.config.sapo_temperature_neg,
        )

    def _with_clip_ratios(
        self, output: LossOutput, logps: Tensor, old_logps: Tensor, advantages: Tensor, sequence: Tensor
    ) -> LossOutput:
        """The output with the shares of tokens (those given), or of sequences, whose ratio is clipped."""
        low, high = self.config.clip_bounds
        stats = ratio_statistics(
            logps,
            old_logps,
            advantages,
            sequence,
            clip_low=low,
            clip_high=high,
            delta=self.config.delta,
            level=self.config.importance_sampling_level,
        )
        means = {
            "clip_ratio/low_mean": (stats.low, stats.count),
            "clip_ratio/high_mean": (stats.high, stats.count),
            "clip_ratio/region_mean": (stats.region, stats.count),
        }
        return replace(
            output,
            means={**output.means, **means},
            lows={"clip_ratio/low_min": stats.low_min},
            highs={"clip_ratio/high_max": stats.high_max},
        )

    def _kl(
        self, logps: Tensor, old_logps: Tensor, examples: Sequence[Any], sequence: Tensor | None
    ) -> Tensor:
        """Estimated KL (M,) to the reference at each token."""
        ref_logps, estimator = flat("ref_logps", examples, self.device), self.config.kl_estimator
        if self.config.use_bias_correction_kl:
            return corrected_kl(logps, old_logps, ref_logps, estimator=estimator, sequence=sequence)
        return KL_ESTIMATORS[estimator](logps, ref_logps)

    def _counted(self, completion: Completion) -> int:
        """Tokens of a completion that count: none of one that was cut off, where those are masked."""
        masked = self.config.mask_truncated_completions and completion.truncated
        return 0 if masked else completion.length
