"""Clipped policy-gradient updates of one player on its own rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_algos import Observers, learning_rate_factor
from rlhf_algos.advantages import (
    gae,
    group_baseline,
    leave_one_out,
    moments,
    scale_by_std,
    standardise_with,
    zero_std_fraction,
)
from rlhf_algos.losses import clipped_policy_loss, kl_k3, value_loss
from rlhf_algos.process_group import all_gather, all_reduce, all_reduce_max, is_main_process, shard
from rlhf_data import PackedBatch, TokenSequence, UserError, pack
from rlhf_infer import Rollout
from rlhf_minmax.config.run import Baseline, MinMaxConfig, PlayerConfig
from rlhf_minmax.config.training import TrainingConfig
from rlhf_minmax.optim.gradient_step import PlayerScorer, ReplicatedStepper, ShardedStepper, Stepper
from rlhf_minmax.players.sharded import ShardedGame, new_critic
from rlhf_models import PolicyModel

_MEASURED = ("loss", "kl", "approx_kl", "clip_fraction", "entropy", "value_loss")
_VALUE_CLIP = 0.2
"""How far a value may move from that at sampling before its loss is clipped, as in TRL's PPO."""


@dataclass(frozen=True)
class _Scored:
    """A packed batch of rollouts with what stays fixed over its updates, all (M,); of weight 0 if idle."""

    batch: PackedBatch
    old_logps: Tensor
    ref_logps: Tensor
    advantages: Tensor
    weight: float = 1.0
    old_values: Tensor | None = None
    returns: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return self.batch.num_tokens if self.weight else 0


def sequence_advantages(rewards: Tensor, groups: Tensor, baseline: Baseline) -> Tensor:
    """(B,) rewards minus their baseline, divided by the batch's deviation; 0 where no group has a spread.

    Args:
        rewards: (B,).
        groups: (B,) index of each completion's group.
        baseline: `group` the group's mean, `leave_one_out` the mean of the others in it, `batch` the mean of
            all; `critic` none here, since values are subtracted token by token: the rewards are returned.
    """
    if baseline == "critic":
        return rewards
    if baseline == "batch":
        groups = torch.zeros_like(groups)
    if zero_std_fraction(rewards, groups) == 1:
        return torch.zeros_like(rewards)
    return scale_by_std((leave_one_out if baseline == "leave_one_out" else group_baseline)(rewards, groups))


class PlayerOptimizer:
    """Updates of one player, each on the rollouts of all processes.

    Args:
        player: whose parameters are trained; they are listed here, once.
        settings: the player's own: temperature, clip range, KL, optimizer.
        config: the run's, for what the player does not set.
        learning_rate: peak learning rate of AdamW.
        total_steps: steps of the run, for the schedule of the learning rate.
        shared: the models of a game that is sharded, the player among them; None for one that is not.

    Attributes:
        observers: the debug switches that observe the next update.
        observed_step: the step, counted from 1, whose first update they observe; None once they have.
    """

    def __init__(
        self,
        player: PolicyModel,
        settings: PlayerConfig,
        config: MinMaxConfig,
        *,
        learning_rate: float,
        total_steps: int = 1,
        shared: ShardedGame | None = None,
    ) -> None:
        game, training = config.game, config.training
        self.player, self.settings = player, settings
        self.epsilon = game.epsilon if settings.epsilon is None else settings.epsilon
        self.beta = game.beta if settings.beta is None else settings.beta
        self.target_kl = game.target_kl if settings.target_kl is None else settings.target_kl
        self.max_grad_norm, self.max_tokens = training.max_grad_norm, training.max_tokens_per_batch
        self.learning_rate, self.total_steps = learning_rate, total_steps
        self.parameters: list[torch.nn.Parameter] = list(player.parameters())
        self.role = None if shared is None else shared.role_of(player)
        if shared is not None and self.role is not None:
            self.critic = shared.critics.get(self.role)
            scorer = PlayerScorer(player, self.critic, settings.temperature)
            self.stepper: Stepper = ShardedStepper(scorer, shared, self.role)
            self.stepper.set_learning_rate(learning_rate)
        else:
            self.critic = new_critic(player, config.seed) if settings.baseline == "critic" else None
            self.stepper = self._replicated(training)
        self.observers: Observers | None = None
        self.observed_step: int | None = None

    def _replicated(self, training: TrainingConfig) -> Stepper:
        settings = self.settings
        adamw = {
            "learning_rate": self.learning_rate,
            "betas": settings.adam_betas,
            "weight_decay": settings.weight_decay,
            "optim": training.optim,
        }
        trained = [*self.parameters, *(self.critic.parameters() if self.critic else ())]
        scorer = PlayerScorer(self.player, self.critic, settings.temperature)
        return ReplicatedStepper(scorer, trained, adamw, max_grad_norm=self.max_grad_norm)

    def begin_step(self, step: int) -> float:
        """Set the learning rate of a step counted from 0, and return it."""
        settings = self.settings
        rate = self.learning_rate * learning_rate_factor(
            step,
            schedule=settings.lr_scheduler_type,
            total_steps=self.total_steps,
            warmup_steps=settings.warmup_steps,
        )
        self.stepper.set_learning_rate(rate)
        return rate

    def update(self, rollouts: Sequence[Rollout], advantages: Tensor, *, updates: int) -> dict[str, float]:
        """Up to `updates` AdamW steps on one batch, fewer when the KL to the sampling policy gets too large.

        Args:
            rollouts: B sampled completions with their sampling log-probs.
            advantages: (B,) as `sequence_advantages` gives them; rewards for a player with a critic.
            updates: maximum number of steps.

        Returns:
            `loss`, `kl` (k3 to the reference, per token), `kl_start` (the same before the first step),
            `sampling_kl` (k3 to the log-probs at sampling, before the first step; 0 but for rounding),
            `approx_kl` (to the sampling policy, after the last step measured), `clip_fraction`, `grad_norm`,
            `entropy`, with a critic `value_loss`; `updates` done, `num_tokens` computed.
        """
        scored = self._prepare(rollouts, advantages)
        total = sum(len(rollout.logps) for rollout in rollouts)
        metrics: dict[str, float] = {}
        first: dict[str, float] = {}
        self.stepper.train(True)
        try:
            for done in range(updates):
                looks_first = done > 0 and not self.stepper.can_drop
                measured = self._pass(scored, total) if looks_first else self._gradient(scored, total)
                if not done:
                    first = {"kl_start": measured["kl"], "sampling_kl": abs(measured["approx_kl"])}
                if done and measured["approx_kl"] > self.target_kl:
                    self.stepper.drop()
                    metrics["approx_kl"] = measured["approx_kl"]
                    break
                if looks_first:
                    measured = self._gradient(scored, total)
                norm = self.stepper.step()
                if norm is not None:
                    measured = _finite(measured | {"grad_norm": float(norm)})
                metrics = {**measured, **first, "updates": done + 1}
        finally:
            self.stepper.train(False)
        computed = sum(all_gather([part.num_tokens for part in scored])) * int(metrics["updates"])
        return metrics | {"num_tokens": computed}

    def _prepare(self, rollouts: Sequence[Rollout], advantages: Tensor) -> list[_Scored]:
        """This process's rollouts in packed batches, with idle ones where processes keep in step."""
        own = list(shard(range(len(rollouts))))
        packed = [(each, 1.0) for each in self._packed([rollouts[i] for i in own], advantages[own])]
        if self.stepper.lock_step:
            idle = all_reduce_max(len(packed)) - len(packed)
            packed = [(each, 0.0) for each in self._packed(rollouts[:1], advantages[:1])] * idle + packed
        parts = [
            _Scored(batch, old, self.stepper.ref_logps(batch), per_token, weight)
            for (batch, old, per_token), weight in packed
        ]
        return parts if self.critic is None else self._with_values(parts)

    def _packed(
        self, rollouts: Sequence[Rollout], advantages: Tensor
    ) -> list[tuple[PackedBatch, Tensor, Tensor]]:
        """Packed batches of rollouts, with log-probs at sampling and advantages (M,) of each."""
        sequences = [TokenSequence([*r.prompt_ids, *r.completion_ids], len(r.prompt_ids)) for r in rollouts]
        parts = []
        for batch in pack(sequences, self.max_tokens) if sequences else ():
            members = batch.sequence_ids
            old = torch.tensor([logp for i in members.tolist() for logp in rollouts[i].logps])
            per_token = advantages[members][batch.score_sequence]
            device = self.player.device
            parts.append((batch.to(device), old.to(device), per_token.to(device)))
        return parts

    def _with_values(self, parts: Sequence[_Scored]) -> list[_Scored]:
        """The parts with values, and with generalised advantages of a reward at the last token, whitened."""
        found = []
        for part in parts:
            with torch.no_grad(), self.stepper.scorer.player.active():
                _, values = self.stepper.scores(part.batch)
            assert values is not None
            sequence = part.batch.score_sequence
            last = torch.ones_like(sequence, dtype=torch.bool)
            last[:-1] = sequence[1:] != sequence[:-1]
            estimate = gae(
                torch.where(last, part.advantages, 0.0), values, sequence, gamma=1.0, lam=self.settings.lam
            )
            found.append(
                replace(part, advantages=estimate.advantages, old_values=values, returns=estimate.returns)
            )
        every = torch.tensor(
            all_gather([a for part in found if part.weight for a in part.advantages.tolist()])
        )
        over_all = moments(every).to(self.player.device)
        return [replace(part, advantages=standardise_with(part.advantages, over_all)) for part in found]

    def _gradient(self, scored: list[_Scored], total: int) -> dict[str, float]:
        """Gradient of the mean loss over all processes' tokens, clipped; returns the metrics of the pass."""
        step, self.observed_step = self.observed_step, None
        observers = None if step is None else self.observers
        if observers and step:
            observers.before_step(step)
        measured = self._pass(scored, total, learns=True)
        self.stepper.sum_gradients()
        if observers and step:
            observers.after_backward(step)
        norm = self.stepper.clip()
        return _finite(measured if norm is None else measured | {"grad_norm": float(norm)})

    def _pass(self, scored: list[_Scored], total: int, *, learns: bool = False) -> dict[str, float]:
        """The loss and other metrics, means over the tokens of all processes; `learns` adds gradients."""
        sums = torch.zeros(len(_MEASURED), device=self.player.device)
        with self.stepper.scorer.player.active(), torch.set_grad_enabled(learns):
            for number, part in enumerate(scored, start=1):
                result, values = self.stepper.scores(part.batch)
                policy = clipped_policy_loss(
                    result.logps,
                    part.old_logps,
                    part.advantages,
                    clip_low=self.epsilon,
                    clip_high=self.epsilon,
                )
                divergence = kl_k3(result.logps, part.ref_logps).sum()
                loss = policy.loss + self.beta * divergence
                error = torch.zeros((), device=self.player.device)
                if values is not None and part.old_values is not None and part.returns is not None:
                    error = value_loss(values, part.old_values, part.returns, clip_range=_VALUE_CLIP).loss
                    loss = loss + self.settings.vf_coef * error
                if learns:
                    self.stepper.backward(loss / total * part.weight, last=number == len(scored))
                assert result.entropy is not None
                clipped = policy.clipped_low + policy.clipped_high
                parts = [loss, divergence, policy.approx_kl, clipped, result.entropy.sum(), error]
                sums += part.weight * torch.stack(parts).detach()
        means = (all_reduce(sums) / total).tolist()
        measured: dict[str, float] = dict(zip(_MEASURED, means, strict=True))
        if self.critic is None:
            del measured["value_loss"]
        return measured

    def save(self, folder: Path, role: str) -> None:
        """Write the optimizer's state and the critic into a folder.

        Every process must call it.
        """
        self.stepper.save(folder, role)
        if self.critic is not None and self.role is None and is_main_process():
            tensors = self.critic.state_dict().items()
            path = folder / f"{role}_critic.safetensors"
            save_file({name: value.detach().cpu().contiguous() for name, value in tensors}, str(path))

    def load(self, folder: Path, role: str) -> None:
        """Restore the state that `save` wrote."""
        if self.critic is not None and self.role is None:
            self.critic.load_state_dict(load_file(str(folder / f"{role}_critic.safetensors")))
        self.stepper.load(folder, role)

    def forget(self) -> None:
        """Drop the optimizer's moments, which belong to the weights before a rollback."""
        self.stepper.weights_replaced()


def _finite(measured: dict[str, float]) -> dict[str, float]:
    """Check that metrics are finite."""
    if all(map(math.isfinite, measured.values())):
        return measured
    norm = measured.get("grad_norm")
    shown = "" if norm is None else f" with gradient norm {norm}"
    raise UserError(
        f"a player's loss became {measured['loss']}{shown}; lower its learning rate", code="non_finite_loss"
    )
