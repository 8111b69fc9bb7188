"""Two time scales: several clipped updates of the monitor, one batch of the policy, then dual ascent on λ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rlhf_algos.advantages import zero_std_fraction
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.config.schedule import Turn, next_turn, smoothed
from rlhf_minmax.constraints.controllers import (
    TRUTHFULNESS,
    Controller,
    controllers,
    flags,
    length_violations,
    penalties,
    under_short_names,
)
from rlhf_minmax.constraints.rollback import MonitorGuard, PolicyGuard, collapse
from rlhf_minmax.dual_ascent import DualState
from rlhf_minmax.game.forward_pass import Answer, CritiqueSample, MinMaxOutput, MinMaxPipeline
from rlhf_minmax.game.rates import spread_ratio, verdict_errors
from rlhf_minmax.optim.extragradient import LookAhead
from rlhf_minmax.optim.player import PlayerOptimizer, sequence_advantages
from rlhf_minmax.players.past_players import Member, playing

Metrics = dict[str, float | None]
_OF_THE_FIRST = {"kl_start", "sampling_kl", "frac_groups_zero_std", "truth_to_judge_spread"}
"""Metrics of the first batch of critiques if there are several: a step is measured on that one."""
_FRESH = 500_000
"""Seeds of a step's further batches of critiques are so far apart."""


class DualPPOOptimizer:
    """Monitor inner updates, policy outer update, dual ascent on every multiplier.

    The monitor's reward for critique j of answer i is -a · w_judge · J_ij - λ · v_ij - penalty, where a is
    `game.adversary_weight`, 1 in the game; the reward model's score does not depend on the critique and
    cancels in the baseline, the mean over the answer's K critiques. The policy's reward is w_reward · R_i +
    w_judge · mean_k J_ik - penalty with fresh critiques of the updated monitor; its baseline is the mean over
    the story's N answers. Further constraints take λ_c · v_c off either reward; the policy's KL constraint
    adds its λ to the weight of the KL in the loss.

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
        self.policy_constraints = controllers("policy", config.constraints.policy)
        self.monitor: PlayerOptimizer | None = None
        self.monitor_constraints: dict[str, Controller] = {}
        self.guard: MonitorGuard | None = None
        self.policy_guard: PolicyGuard | None = None
        self.balanced_accuracy: float | None = None
        self._ahead: dict[str, LookAhead] = {}
        dual = config.constraint.dual_settings()
        if config.training.monitor_updates_per_policy == 0:
            dual = replace(dual, rule="fixed")  # λ has no effect
        self._truth = Controller(TRUTHFULNESS, dual, config.training.constraint_penalty_lambda)
        if adversary:
            self.monitor = self._player("monitor", total_steps)
            self.monitor_constraints = controllers("monitor", config.constraints.monitor)
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
        """Those that are trained, by role."""
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
        past_monitor: Member | None = None,
    ) -> Metrics:
        """One round of both players on one forward pass.

        Args:
            output: the pass.
            seed: of fresh critiques.
            policy_learns: false during the monitor's warm-up.
            past_monitor: whose critiques pay the policy in place of the monitor's.

        Returns:
            Metrics under `monitor/`, `policy/`, `dual/`, `constraint/`, `dynamics/` and `guard/`.
        """
        turn = self._turn(output, in_warmup=not policy_learns)
        metrics: Metrics = {"dynamics/balanced_accuracy_ema": self.balanced_accuracy}
        if turn.monitor_updates:
            metrics |= self.monitor_step(output, updates=turn.monitor_updates, seed=seed)
        self._land("monitor")
        metrics |= self.dual_step(output.mean_violation)
        if turn.monitor_updates and self.guard is not None:
            metrics |= self._guarded(self.guard, output, metrics)
        if turn.policy_learns:
            metrics |= self._policy_turn(output, seed, past_monitor)
        self._land("policy")
        if turn.policy_learns and self.policy_guard is not None:
            metrics |= self._policy_guarded(self.policy_guard, cast(float, metrics["policy/judged_value"]))
        return metrics

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """A step within this context moves the players, to look ahead, and nothing else but Adam's moments.

        The next `step`, on a round that the players have played as they are then, is taken from where they
        stood before; see `LookAhead`.
        """
        ahead = {role: LookAhead(player.stepper.trained) for role, player in self.players().items()}
        accuracy, guards = self.balanced_accuracy, (self.guard, self.policy_guard)
        self.guard = self.policy_guard = None
        multipliers = [controller.to_dict() for controller in self._all_controllers()]
        yield
        self.balanced_accuracy, (self.guard, self.policy_guard) = accuracy, guards
        for controller, state in zip(self._all_controllers(), multipliers, strict=True):
            controller.load(state)
        for each in ahead.values():
            each.turn()
        self._ahead = ahead

    def _land(self, role: str) -> None:
        """Take a player's move from where it began to look ahead, if it did."""
        ahead = self._ahead.pop(role, None)
        if ahead is not None:
            ahead.land()

    def _policy_turn(self, output: MinMaxOutput, seed: int, past_monitor: Member | None) -> Metrics:
        """The policy's updates on reward and judge."""
        judged = self._judged(output, seed, past_monitor)
        parts = self.config.game.w_reward * output.rewards, self.pipeline.w_judge * judged
        stories = torch.tensor([answer.story for answer in output.answers])
        spread = spread_ratio(*parts, stories)
        value = float((parts[0] + parts[1]).mean())
        metrics: Metrics = {"policy/reward_to_judge_spread": spread, "policy/judged_value": value}
        return metrics | self.policy_step(output.answers, parts[0] + parts[1])

    def _judged(self, output: MinMaxOutput, seed: int, past_monitor: Member | None) -> Tensor:
        """(A,) judge scores of the policy's answers, the mean over fresh critiques or without any."""
        with self._critic(past_monitor):
            return self.pipeline.policy_judge_scores(output.records, output.answers, seed=seed + 2)

    def _critic(self, past_monitor: Member | None) -> AbstractContextManager[object]:
        """The monitor as it is, or as it was."""
        if past_monitor is None:
            return nullcontext()
        return playing(self.pipeline.players.monitor, past_monitor)

    def begin_step(self, step: int) -> dict[str, float]:
        """Set both players' learning rates for a step counted from 0; the rates and their ratio.

        The policy's schedule begins where it begins to learn.
        """
        for player in self.players().values():
            player.observed_step = step + 1
        rates = {"policy/learning_rate": self.policy.begin_step(max(0, step - self._policy_starts))}
        if self.monitor is not None:
            rates["monitor/learning_rate"] = self.monitor.begin_step(step)
            if rates["policy/learning_rate"] > 0:
                rates["dynamics/lr_ratio"] = rates["monitor/learning_rate"] / rates["policy/learning_rate"]
        return rates

    def end_step(self) -> None:
        """Take both players' weights into their averages."""
        for player in self.players().values():
            player.end_step()

    def _turn(self, output: MinMaxOutput, *, in_warmup: bool) -> Turn:
        schedule = self.config.schedule
        errors = [rate for rate in verdict_errors(*output.labelled()) if rate is not None]
        if errors:
            accuracy = 1 - sum(errors) / len(errors)
            self.balanced_accuracy = smoothed(self.balanced_accuracy, accuracy, schedule.smoothing)
        updates = self.config.training.monitor_updates_per_policy
        return next_turn(schedule, self.balanced_accuracy, monitor_updates=updates, in_warmup=in_warmup)

    def monitor_step(self, output: MinMaxOutput, *, updates: int | None = None, seed: int = 0) -> Metrics:
        """Inner updates of the monitor: on the critiques of one pass, or each on fresh critiques.

        Args:
            output: the pass.
            updates: most updates; None for `monitor_updates_per_policy`, or 1 where that freezes it.
            seed: of fresh critiques, which `schedule.monitor_refresh: resample` draws for all but the first.
        """
        updates = updates or max(1, self.config.training.monitor_updates_per_policy)
        metrics = self._monitor_update(
            output, updates if self.config.schedule.monitor_refresh == "reuse" else 1
        )
        if self.config.schedule.monitor_refresh == "resample":
            for i in range(1, updates):
                fresh = self.pipeline.criticise_again(output, seed=seed + _FRESH * i)
                newest = self._monitor_update(fresh, 1)
                sums = {name: metrics[name] + newest[name] for name in ("updates", "num_tokens")}
                metrics = newest | {name: metrics[name] for name in _OF_THE_FIRST & metrics.keys()} | sums
        metrics |= self._move(self.monitor_constraints, self._monitor_violations(output.critiques))
        return {name if "/" in name else f"monitor/{name}": value for name, value in metrics.items()}

    def _monitor_update(self, output: MinMaxOutput, updates: int) -> dict[str, Any]:
        assert self.monitor is not None
        critiques = output.critiques
        unparsable = flags([critique.parsed is None for critique in critiques])
        judged = self.config.game.adversary_weight * self.pipeline.w_judge * output.judge_scores
        rewards = (
            -judged
            - self.dual.multiplier * output.weighted_violation
            - self.config.game.unparsable_critique_penalty * unparsable
            - penalties(self.monitor_constraints, self._monitor_violations(critiques), len(critiques))
        )
        groups = torch.tensor([critique.answer for critique in critiques])
        spread = spread_ratio(self.dual.multiplier * output.weighted_violation, judged, groups)
        with self.pipeline.watch.timing("monitor_update"):
            metrics = self.monitor.update(
                [critique.rollout for critique in critiques],
                sequence_advantages(rewards, groups, self.config.monitor_model.baseline),
                updates=updates,
            )
        share = float(zero_std_fraction(rewards, groups))
        return metrics | {"frac_groups_zero_std": share, "truth_to_judge_spread": spread}

    def _monitor_violations(self, critiques: Sequence[CritiqueSample]) -> dict[str, Tensor]:
        limit = self.config.monitor_model.max_new_tokens
        measures = {
            "monitor_length": lambda: length_violations([c.rollout for c in critiques], limit),
            "monitor_format": lambda: flags([c.parsed is None for c in critiques]),
            "monitor_evidence": lambda: flags([not c.evidence_valid for c in critiques]),
        }
        return {name: measures[name]() for name in self.monitor_constraints}

    def dual_step(self, violation: float | None) -> Metrics:
        """Move truthfulness' λ by the violation measured on the batch; without a measurement it stays."""
        return under_short_names(self._truth.update(violation))

    @staticmethod
    def _move(controllers: Mapping[str, Controller], violations: Mapping[str, Tensor]) -> Metrics:
        """Move the multipliers whose violations were measured."""
        metrics: Metrics = {}
        for name, measured in violations.items():
            metrics |= controllers[name].update(float(measured.mean()))
        return metrics

    def _guarded(self, guard: MonitorGuard, output: MinMaxOutput, metrics: Metrics) -> Metrics:
        """Keep a good monitor, put a collapsed one back with all that is known of it; what is true then.

        A batch without a label measures no monitor, good or bad.
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
        if not guard.is_worse(self.dual.violation_ema):
            sign = None
        collapsed = guard.observe(sign)
        if collapsed and self.config.guards.rollback:
            state = guard.roll_back()
            assert self.monitor is not None
            self.monitor.forget()
            if state is not None:
                self._truth.go_back(state["dual"])
                self.balanced_accuracy = state["balanced_accuracy"]
        elif sign is None:
            known = {"dual": self._truth.to_dict(), "balanced_accuracy": self.balanced_accuracy}
            guard.remember(self.dual.violation_ema, threshold, known)
        found = {
            "guard/collapsed": float(sign is not None),
            "guard/rollbacks": float(guard.rollbacks),
            "dynamics/balanced_accuracy_ema": self.balanced_accuracy,
        }
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
        violations = self._policy_violations(answers)
        rewards = rewards - self.config.game.unparsable_answer_penalty * flags(
            [answer.claim is None for answer in answers]
        )
        rewards = rewards - penalties(self.policy_constraints, violations, len(answers))
        groups = torch.tensor([answer.story for answer in answers])
        rollouts = [answer.rollout for answer in answers if answer.rollout is not None]
        kl = self.policy_constraints.get("policy_kl")
        if kl is not None:
            self.policy.kl_multiplier = kl.state.multiplier
        with self.pipeline.watch.timing("policy_update"):
            metrics = self.policy.update(
                rollouts,
                sequence_advantages(rewards, groups, self.config.policy_model.baseline),
                updates=self.config.training.policy_updates,
            )
        if kl is not None:
            violations["policy_kl"] = torch.tensor(metrics["kl_start"])
        metrics["frac_groups_zero_std"] = float(zero_std_fraction(rewards, groups))
        metrics = {f"policy/{name}": value for name, value in metrics.items()}
        return metrics | self._move(self.policy_constraints, violations)

    def _policy_violations(self, answers: Sequence[Answer]) -> dict[str, Tensor]:
        limit = self.config.policy_model.max_new_tokens
        measures = {
            "policy_length": lambda: length_violations([a.rollout for a in answers if a.rollout], limit),
            "policy_refusal": lambda: flags([answer.claim is None for answer in answers]),
        }
        return {name: measures[name]() for name in self.policy_constraints if name in measures}

    @property
    def keeps_averages(self) -> bool:
        """Whether a player keeps an average of its weights."""
        return any(player.average for player in self.players().values())

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Both players with their averaged weights, where they keep any."""
        with ExitStack() as stack:
            for player in self.players().values():
                stack.enter_context(player.averaged())
            yield

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the players' optimizer states into a folder; everything else, for the trainer's JSON.

        Every process must call it.
        """
        self.policy.save(folder, "policy")
        if self.monitor is not None and self.guard is not None:
            self.monitor.save(folder, "monitor")
            self.guard.save(folder / "good_monitor")
        if self.policy_guard is not None:
            self.policy_guard.save(folder / "good_policy")
        return {
            "controllers": {each.name: each.to_dict() for each in self._all_controllers()},
            "guard": self.guard and self.guard.to_dict(),
            "policy_guard": self.policy_guard and self.policy_guard.to_dict(),
            "balanced_accuracy": self.balanced_accuracy,
        }

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take up what `save` wrote."""
        self.policy.load(folder, "policy")
        if self.monitor is not None and self.guard is not None:
            self.monitor.load(folder, "monitor")
            self.guard.load(state["guard"], folder / "good_monitor")
        if self.policy_guard is not None and state.get("policy_guard"):  # older checkpoints have none
            self.policy_guard.load(state["policy_guard"], folder / "good_policy")
        for controller in self._all_controllers():
            controller.load(state["controllers"][controller.name])
        self.balanced_accuracy = state["balanced_accuracy"]

    def _all_controllers(self) -> list[Controller]:
        return [self._truth, *self.monitor_constraints.values(), *self.policy_constraints.values()]
