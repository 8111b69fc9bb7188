"""Two time scales: several clipped updates of the monitor, one batch of the policy, then dual ascent on λ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf_algos import create_optimizer, load_optimizer_state, save_optimizer_state
from rlhf_algos.advantages import group_baseline, scale_by_std, zero_std_fraction
from rlhf_algos.losses import clipped_policy_loss, kl_k3
from rlhf_data import PackedBatch, TokenSequence, UserError, pack
from rlhf_infer import Rollout
from rlhf_minmax.config import MinMaxConfig
from rlhf_minmax.duals import DualSettings, DualState, update_multiplier
from rlhf_minmax.pipeline import Answer, CritiqueSample, MinMaxOutput, MinMaxPipeline
from rlhf_models import PolicyModel

ADAM_BETAS = (0.9, 0.95)
"""Decay rates of AdamW's moments; the second is short, since rewards drift."""


@dataclass(frozen=True)
class _Scored:
    """A packed batch of rollouts with what stays fixed over its updates, all (M,)."""

    batch: PackedBatch
    old_logps: Tensor
    ref_logps: Tensor
    advantages: Tensor


class PlayerOptimizer:
    """Clipped policy-gradient updates of one player on stored rollouts.

    Args:
        player: whose parameters are trained; they are listed here, once.
        learning_rate: of AdamW.
        temperature: of the sampling.
        config: clip range, KL weight and stop, gradient norm, token budget.
    """

    def __init__(
        self, player: PolicyModel, *, learning_rate: float, temperature: float, config: MinMaxConfig
    ) -> None:
        self.player, self.temperature = player, temperature
        self.game, self.training = config.game, config.training
        self.parameters = player.parameters()
        self.optimizer = create_optimizer(self.parameters, learning_rate=learning_rate, betas=ADAM_BETAS)

    def update(self, rollouts: Sequence[Rollout], advantages: Tensor, *, updates: int) -> dict[str, float]:
        """Up to `updates` AdamW steps on one batch, fewer when the KL to the sampling policy gets too large.

        Args:
            rollouts: B sampled completions with their sampling log-probs.
            advantages: (B,).
            updates: most steps.

        Returns:
            `loss`, `kl` (k3 to the reference, per token), `approx_kl` (to the sampling policy, after the last
            step measured), `clip_fraction`, `grad_norm`, `entropy`, `updates` done, `num_tokens` computed.

        Raises:
            UserError: the loss or its gradient is not finite.
        """
        scored = self._prepare(rollouts, advantages)
        total = sum(len(part.old_logps) for part in scored)
        metrics: dict[str, float] = {}
        model = self.player.model.train()
        try:
            for done in range(updates):
                measured = self._gradient(scored, total)
                if done and measured["approx_kl"] > self.game.target_kl:
                    self.optimizer.zero_grad(set_to_none=True)
                    metrics["approx_kl"] = measured["approx_kl"]
                    break
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                metrics = {**measured, "updates": done + 1}
        finally:
            model.eval()
        return metrics | {
            "num_tokens": sum(part.batch.num_tokens for part in scored) * int(metrics["updates"])
        }

    def _prepare(self, rollouts: Sequence[Rollout], advantages: Tensor) -> list[_Scored]:
        sequences = [TokenSequence([*r.prompt_ids, *r.completion_ids], len(r.prompt_ids)) for r in rollouts]
        parts = []
        for batch in pack(sequences, self.training.max_tokens_per_batch):
            members = batch.sequence_ids
            old = torch.tensor([logp for i in members.tolist() for logp in rollouts[i].logps])
            spread = advantages[members][batch.score_sequence].to(self.player.device)
            batch = batch.to(self.player.device)
            ref = self.player.ref_logps(batch, temperature=self.temperature)
            parts.append(_Scored(batch, old.to(self.player.device), ref, spread))
        return parts

    def _gradient(self, scored: list[_Scored], total: int) -> dict[str, float]:
        """Gradient of the mean loss over all tokens, clipped, and what was measured on the way."""
        sums = torch.zeros(5, device=self.player.device)
        with self.player.active():
            for part in scored:
                result = self.player.logps(part.batch, temperature=self.temperature, with_entropy=True)
                policy = clipped_policy_loss(
                    result.logps,
                    part.old_logps,
                    part.advantages,
                    clip_low=self.game.epsilon,
                    clip_high=self.game.epsilon,
                )
                divergence = kl_k3(result.logps, part.ref_logps).sum()
                loss = policy.loss + self.game.beta * divergence
                (loss / total).backward()
                assert result.entropy is not None
                clipped = policy.clipped_low + policy.clipped_high
                sums += torch.stack(
                    [loss, divergence, policy.approx_kl, clipped, result.entropy.sum()]
                ).detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        loss, kl, approx_kl, clipped, entropy = (sums / total).tolist()
        if not torch.isfinite(norm) or not torch.isfinite(sums).all():
            raise UserError(
                f"a player's loss became {loss} with gradient norm {float(norm)}; lower its learning rate"
            )
        return {
            "loss": loss,
            "kl": kl,
            "approx_kl": approx_kl,
            "clip_fraction": clipped,
            "entropy": entropy,
            "grad_norm": float(norm),
        }


class DualPPOOptimizer:
    """Monitor inner updates, policy outer update, dual ascent on λ.

    The monitor's reward for critique j of answer i is -w_judge · J_ij - λ · v_ij - penalty; the reward
    model's score does not depend on the critique and cancels in the baseline, the mean over the answer's K
    critiques. The policy's reward is w_reward · R_i + w_judge · mean_k J_ik - penalty with fresh critiques of
    the updated monitor; its baseline is the mean over the story's N answers.

    Args:
        pipeline: makes fresh critiques for the policy's reward.
        config: the run's settings.
        adversary: whether there is a monitor; without one the policy is trained on the reward model alone.
    """

    def __init__(self, pipeline: MinMaxPipeline, config: MinMaxConfig, *, adversary: bool = True) -> None:
        self.pipeline, self.config = pipeline, config
        self.policy = PlayerOptimizer(
            pipeline.players.policy,
            learning_rate=config.training.policy_learning_rate,
            temperature=config.policy_model.temperature,
            config=config,
        )
        self.monitor: PlayerOptimizer | None = None
        if adversary:
            self.monitor = PlayerOptimizer(
                pipeline.players.monitor,
                learning_rate=config.training.monitor_learning_rate,
                temperature=config.monitor_model.temperature,
                config=config,
            )
        self.dual_settings = dual_settings(config)
        start = config.training.constraint_penalty_lambda
        self.dual = DualState(start, integral=start / config.constraint.step_size)

    def step(self, output: MinMaxOutput, *, seed: int, policy_learns: bool = True) -> dict[str, float]:
        """One round of both players on one forward pass.

        Args:
            output: the pass.
            seed: of the fresh critiques.
            policy_learns: false during the monitor's warm-up.

        Returns:
            Metrics under `monitor/`, `policy/`, `dual/` and `constraint/`.
        """
        metrics = self.monitor_step(output)
        metrics |= self.dual_step(float(output.weighted_violation.mean()))
        if policy_learns:
            fresh = self.pipeline.criticise(
                output.records, output.answers, self.config.game.policy_critiques, seed=seed + 2
            )
            judged = self.pipeline.judge_scores(output.records, output.answers, fresh)
            mean = judged.view(len(output.answers), -1).mean(1)
            rewards = self.config.game.w_reward * output.rewards + self.pipeline.w_judge * mean
            metrics |= self.policy_step(output.answers, rewards)
        return metrics

    def monitor_step(self, output: MinMaxOutput) -> dict[str, float]:
        """Inner updates of the monitor on the critiques of one pass."""
        assert self.monitor is not None
        game = self.config.game
        unparsable = torch.tensor([c.parsed is None for c in output.critiques]).float()
        rewards = (
            -self.pipeline.w_judge * output.judge_scores
            - self.dual.multiplier * output.weighted_violation
            - game.unparsable_critique_penalty * unparsable
        )
        groups = torch.tensor([c.answer for c in output.critiques])
        metrics = self.monitor.update(
            [critique.rollout for critique in output.critiques],
            scale_by_std(group_baseline(rewards, groups)),
            updates=self.config.training.monitor_updates_per_policy,
        )
        metrics["frac_groups_zero_std"] = float(zero_std_fraction(rewards, groups))
        return {f"monitor/{name}": value for name, value in metrics.items()}

    def dual_step(self, violation: float) -> dict[str, float]:
        """Move λ by the violation measured on the batch."""
        self.dual = update_multiplier(self.dual, violation, self.dual_settings)
        assert self.dual.violation_ema is not None
        return {
            "constraint/violation": violation,
            "constraint/violation_ema": self.dual.violation_ema,
            "dual/lambda": self.dual.multiplier,
            "dual/saturated": float(self.dual.saturated(self.dual_settings)),
        }

    def policy_step(self, answers: Sequence[Answer], rewards: Tensor) -> dict[str, float]:
        """Update of the policy on the answers of one pass."""
        rewards = rewards - self.config.game.unparsable_answer_penalty * torch.tensor(
            [answer.claim is None for answer in answers]
        )
        groups = torch.tensor([answer.story for answer in answers])
        rollouts = [answer.rollout for answer in answers if answer.rollout is not None]
        metrics = self.policy.update(
            rollouts,
            scale_by_std(group_baseline(rewards, groups)),
            updates=self.config.training.policy_updates,
        )
        metrics["frac_groups_zero_std"] = float(zero_std_fraction(rewards, groups))
        return {f"policy/{name}": value for name, value in metrics.items()}

    def save(self, folder: Path) -> dict[str, float | None]:
        """Write the players' optimizer states into a folder; the dual state, for the trainer's JSON."""
        save_optimizer_state(self.policy.optimizer, folder / "policy_optimizer.safetensors")
        if self.monitor is not None:
            save_optimizer_state(self.monitor.optimizer, folder / "monitor_optimizer.safetensors")
        return {
            "multiplier": self.dual.multiplier,
            "violation_ema": self.dual.violation_ema,
            "integral": self.dual.integral,
        }

    def load(self, folder: Path, dual: dict[str, float | None]) -> None:
        """Take up what `save` wrote."""
        load_optimizer_state(self.policy.optimizer, folder / "policy_optimizer.safetensors")
        if self.monitor is not None:
            load_optimizer_state(self.monitor.optimizer, folder / "monitor_optimizer.safetensors")
        self.dual = replace(self.dual, **dual)


def dual_settings(config: MinMaxConfig) -> DualSettings:
    """The dual controller's constants from the run's settings."""
    constraint = config.constraint
    return DualSettings(
        rule=constraint.rule,
        threshold=constraint.threshold,
        step_size=constraint.step_size,
        smoothing=constraint.smoothing,
        minimum=constraint.lambda_min,
        maximum=constraint.lambda_max,
    )


def critique_rates(critiques: Sequence[CritiqueSample]) -> dict[str, float]:
    """Shares of critiques that keep the form, quote the story, or were cut off."""
    count = max(len(critiques), 1)
    return {
        "monitor/parse_rate": sum(c.parsed is not None for c in critiques) / count,
        "monitor/evidence_valid_rate": sum(c.evidence_valid for c in critiques) / count,
        "monitor/truncated_rate": sum(c.rollout.finish_reason == "length" for c in critiques) / count,
    }
