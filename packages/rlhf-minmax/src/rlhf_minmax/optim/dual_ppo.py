"""Two time scales: several clipped updates of the monitor, one batch of the policy, then dual ascent on λ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_algos.advantages import zero_std_fraction
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.constraints.controllers import TRUTHFULNESS, Controller, under_short_names
from rlhf_minmax.constraints.rollback import MonitorGuard, PolicyGuard, collapse
from rlhf_minmax.dual_ascent import DualState
from rlhf_minmax.game import seeds
from rlhf_minmax.game.forward_pass import Answer, MinMaxOutput, MinMaxPipeline
from rlhf_minmax.game.rates import spread_ratio, verdict_errors
from rlhf_minmax.optim.player import PlayerOptimizer, sequence_advantages

Metrics = dict[str, float | None]


class DualPPOOptimizer:
    """Monitor inner updates, policy outer update, dual ascent on the multiplier.

    The monitor's reward for critique j of answer i is -a · w_judge · J_ij - λ · v_ij - penalty, where a is
    `game.adversary_weight`, 1 in the game; the reward model's score does not depend on the critique and
    cancels in the baseline, the mean over the answer's K critiques. The policy's reward is w_reward · R_i +
    w_judge · mean_k J_ik - penalty with fresh critiques of the updated monitor; its baseline is the mean over
    the story's N answers.

    Args:
        pipeline: makes fresh critiques for the policy's reward.
        config: the run's settings.
        adversary: whether there is a monitor; without one the policy is trained on the reward model alone.
        total_steps: steps of the run, for schedules of learning rates.
    """

    def __init__(
        self,
        pipeline: MinMaxPipeline,
        config: MinMaxConfig,
        *,
        adversary: bool = True,
        total_steps: int = 1,
    ) -> None:
        self.pipeline, self.config = pipeline, config
        self._policy_starts = config.training.num_warmup_steps(total_steps) if adversary else 0
        self.policy = self._player("policy", max(1, total_steps - self._policy_starts))
        self.monitor: PlayerOptimizer | None = None
        self._monitor_updates = config.training.monitor_updates_per_policy
        self.guard: MonitorGuard | None = None
        self.policy_guard: PolicyGuard | None = None
        dual = config.constraint.dual_settings()
        if config.training.monitor_updates_per_policy == 0:
            dual = replace(dual, rule="fixed")  # λ has no effect
        self._truth = Controller(TRUTHFULNESS, dual, config.training.constraint_penalty_lambda)
        if adversary:
            self.monitor = self._player("monitor", total_steps)
            self.guard = MonitorGuard(config.guards, self.monitor.parameters)
            self.policy_guard = PolicyGuard(config.guards, self.policy.parameters)

    def _player(self, role: Literal["policy", "monitor"], total_steps: int) -> PlayerOptimizer:
        config = self.config
        return PlayerOptimizer(
            getattr(self.pipeline.players, role),
            getattr(config, f"{role}_model"),
            config,
            learning_rate=getattr(config.training, f"{role}_learning_rate"),
            total_steps=total_steps,
            shared=self.pipeline.shared,
        )

    def players(self) -> dict[str, PlayerOptimizer]:
        """The players that are trained, by role."""
        return {"policy": self.policy} | ({"monitor": self.monitor} if self.monitor else {})

    @property
    def dual(self) -> DualState:
        """The truthfulness constraint's multiplier and what its rule remembers."""
        return self._truth.state

    def step(
        self,
        output: MinMaxOutput,
        *,
        seed: int,
        policy_learns: bool = True,
    ) -> Metrics:
        """One round of both players on one forward pass.

        Args:
            output: the pass.
            seed: of fresh critiques.
            policy_learns: false during the monitor's warm-up.

        Returns:
            Metrics under `monitor/`, `policy/`, `dual/`, `constraint/`, `dynamics/` and `guard/`.
        """
        metrics: Metrics = {}
        if self._monitor_updates:
            metrics |= self.monitor_step(output, updates=self._monitor_updates)
        metrics |= self.dual_step(output.mean_violation)
        if self._monitor_updates and self.guard is not None:
            metrics |= self._guarded(self.guard, output, metrics)
        if policy_learns:
            metrics |= self._policy_turn(output, seed)
        return metrics

    def _policy_turn(self, output: MinMaxOutput, seed: int) -> Metrics:
        """The policy's updates on reward and judge, and its guard; critiques are fresh ones."""
        judge_scores = self.pipeline.policy_judge_scores(
            output.records, output.answers, seed=seed + seeds.POLICY_CRITIQUES
        )
        parts = self.config.game.w_reward * output.rewards, self.pipeline.w_judge * judge_scores
        stories = torch.tensor([answer.story for answer in output.answers])
        spread = spread_ratio(*parts, stories)
        value = float((parts[0] + parts[1]).mean())
        metrics: Metrics = {"policy/reward_to_judge_spread": spread, "policy/judged_value": value}
        metrics |= self.policy_step(output.answers, parts[0] + parts[1])
        if self.policy_guard is not None:
            metrics |= self._policy_guarded(self.policy_guard, value)
        return metrics

    def begin_step(self, step: int) -> dict[str, float]:
        """Set both players' learning rates for a step counted from 0; the rates and their ratio.

        The policy's schedule begins where it begins to learn.
        """
        training = self.config.training
        monitor_frozen = training.monitor_steps is not None and step >= training.monitor_steps
        self._monitor_updates = 0 if monitor_frozen else training.monitor_updates_per_policy
        for player in self.players().values():
            player.observed_step = step + 1
        rates = {"policy/learning_rate": self.policy.begin_step(max(0, step - self._policy_starts))}
        if self.monitor is not None:
            rates["monitor/learning_rate"] = self.monitor.begin_step(step)
            if rates["policy/learning_rate"] > 0:
                rates["dynamics/lr_ratio"] = rates["monitor/learning_rate"] / rates["policy/learning_rate"]
        return rates

    def monitor_step(self, output: MinMaxOutput, *, updates: int | None = None) -> Metrics:
        """Inner updates of the monitor on the critiques of one pass.

        Args:
            output: the pass.
            updates: maximum number of updates; None for `monitor_updates_per_policy`, or 1 where that is 0.
        """
        assert self.monitor is not None
        critiques = output.critiques
        unparsable = torch.tensor([float(critique.parsed is None) for critique in critiques])
        opposed = self.config.game.adversary_weight * self.pipeline.w_judge * output.judge_scores
        rewards = (
            -opposed
            - self.dual.multiplier * output.weighted_violation
            - self.config.game.unparsable_critique_penalty * unparsable
        )
        groups = torch.tensor([critique.answer for critique in critiques])
        spread = spread_ratio(self.dual.multiplier * output.weighted_violation, opposed, groups)
        with self.pipeline.watch.timing("monitor_update"):
            metrics = self.monitor.update(
                [critique.rollout for critique in critiques],
                sequence_advantages(rewards, groups, self.config.monitor_model.baseline),
                updates=updates or max(1, self.config.training.monitor_updates_per_policy),
            )
        share = float(zero_std_fraction(rewards, groups))
        found: Metrics = {**metrics, "frac_groups_zero_std": share, "truth_to_judge_spread": spread}
        return {f"monitor/{name}": value for name, value in found.items()}

    def dual_step(self, violation: float | None) -> Metrics:
        """Move truthfulness' λ by the violation measured on the batch; without a measurement it stays."""
        return under_short_names(self._truth.update(violation))

    def _guarded(self, guard: MonitorGuard, output: MinMaxOutput, metrics: Metrics) -> Metrics:
        """Keep a good monitor; roll a collapsed one back, with its multiplier; return the guard's metrics.

        A batch without a label gives no measurement of the monitor.
        """
        if output.mean_violation is None or self.dual.violation_ema is None:
            guard.pass_over()
            return {}
        threshold = self.config.constraint.threshold
        false_positive_rate, false_negative_rate = verdict_errors(*output.labelled())
        sign = collapse(
            self.config.guards,
            false_positive_rate=false_positive_rate,
            false_negative_rate=false_negative_rate,
            zero_std=metrics.get("monitor/frac_groups_zero_std") or 0.0,
            excess=self.dual.violation_ema - threshold,
            saturated=self.dual.multiplier >= self.config.constraint.lambda_max,
        )
        if self._truth.is_off or not guard.is_worse(self.dual.violation_ema):
            sign = None
        collapsed = guard.observe(sign)
        if collapsed and self.config.guards.rollback:
            state = guard.roll_back()
            assert self.monitor is not None
            self.monitor.forget()
            if state is not None:
                self._truth.go_back(state["dual"])
        elif sign is None:
            guard.remember(self.dual.violation_ema, threshold, {"dual": self._truth.to_dict()})
        found = {"guard/collapsed": float(sign is not None), "guard/rollbacks": float(guard.rollbacks)}
        return under_short_names(self._truth.metrics(output.mean_violation)) | found

    def _policy_guarded(self, guard: PolicyGuard, value: float) -> Metrics:
        """Keep a good policy, put a collapsed one back."""
        collapsed = guard.observe(value, self.config.game.w_reward + self.pipeline.w_judge)
        if collapsed and self.config.guards.rollback:
            guard.roll_back()
            self.policy.forget()
        return {"guard/policy_collapsed": float(collapsed), "guard/policy_rollbacks": float(guard.rollbacks)}

    def policy_step(self, answers: Sequence[Answer], rewards: Tensor) -> Metrics:
        """Update of the policy on the answers of one pass."""
        unparsable = torch.tensor([float(answer.claim is None) for answer in answers])
        rewards = rewards - self.config.game.unparsable_answer_penalty * unparsable
        groups = torch.tensor([answer.story for answer in answers])
        rollouts = [answer.rollout for answer in answers if answer.rollout is not None]
        with self.pipeline.watch.timing("policy_update"):
            metrics = self.policy.update(
                rollouts,
                sequence_advantages(rewards, groups, self.config.policy_model.baseline),
                updates=self.config.training.policy_updates,
            )
        metrics["frac_groups_zero_std"] = float(zero_std_fraction(rewards, groups))
        return {f"policy/{name}": value for name, value in metrics.items()}

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the players' optimizer states into a folder; returns the rest, for the trainer's JSON.

        Every process must call it.
        """
        self.policy.save(folder, "policy")
        if self.monitor is not None and self.guard is not None:
            self.monitor.save(folder, "monitor")
            self.guard.save(folder / "good_monitor")
        if self.policy_guard is not None:
            self.policy_guard.save(folder / "good_policy")
        return {
            "dual": self._truth.to_dict(),
            "guard": self.guard and self.guard.to_dict(),
            "policy_guard": self.policy_guard and self.policy_guard.to_dict(),
        }

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Restore the state that `save` wrote."""
        self.policy.load(folder, "policy")
        if self.monitor is not None and self.guard is not None:
            self.monitor.load(folder, "monitor")
            self.guard.load(state["guard"], folder / "good_monitor")
        if self.policy_guard is not None and state.get("policy_guard"):  # older checkpoints have none
            self.policy_guard.load(state["policy_guard"], folder / "good_policy")
        self._truth.load(state["dual"])
