"""Proximal policy optimisation: a value model estimates the return from each token."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from rlhf_algos.checkpoints.manager import load_weights
from rlhf_algos.configs.online import PPOConfig
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.kl_control import AdaptiveKLController, FixedKLController
from rlhf_algos.losses import KL_ESTIMATORS, clipped_policy_loss, policy_ratio, value_loss
from rlhf_algos.online.actor_critic import ActorCritic
from rlhf_algos.online.base import OnlineTrainer
from rlhf_algos.online.importance_correction import sampling_correction, with_correction
from rlhf_algos.online.ppo_advantages import PPORewards, compute_token_advantages
from rlhf_algos.online.rollouts import Completion, StepTable, flat, keep_tokens, spread
from rlhf_data import PackedBatch, PromptExample
from rlhf_models import ValueHead, ValueModel, disable_dropout, is_deferred, recompute_layers


class PPOTrainer(OnlineTrainer):
    """Trains a policy and its value model by PPO (https://arxiv.org/abs/1707.06347) as RLHF uses it.

    A reward function's score counts at the last token of a completion, the KL to the reference at every token
    (https://arxiv.org/abs/1909.08593).  Metrics: those of `rollout_metrics`; under the names of TRL's former
    trainer `objective/kl` (nats per completion), `objective/entropy`, `objective/scores`,
    `objective/non_score_reward`, `objective/rlhf_reward`, `policy/approxkl_avg`, `policy/clipfrac_avg`,
    `policy/entropy_avg`, `loss/policy_avg`, `loss/value_avg`, `val/clipfrac_avg`, `val/ratio`,
    `val/ratio_var`, `val/num_eos_tokens`, `val/explained_variance`, `episode`; `kl_coef`; and those of
    `SamplingCorrection` with vLLM and with an engine that samples ahead.

    Args:
        model: see `OnlineTrainer`.
        config: the settings.
        examples: the training prompts.
        value_model: a `ValueModel`, or a `ValueHead` on the policy's trunk; None starts one from the policy.
        **options: see `OnlineTrainer`.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("reward", "objective/kl", "val/explained_variance")
    token_fields = (*OnlineTrainer.token_fields, "old_values", "returns")
    config: PPOConfig

    def __init__(
        self,
        model: Any,
        config: PPOConfig,
        examples: Sequence[PromptExample],
        *,
        value_model: ValueModel | ValueHead | None = None,
        tokenizer: Any,
        **options: Any,
    ) -> None:
        self.value_model = value_model or start_value_model(model, tokenizer, config)
        if config.disable_dropout:
            disable_dropout(self.value_model)
        if config.gradient_checkpointing and isinstance(self.value_model, ValueModel):
            recompute_layers(self.value_model)
        start, target = config.kl_coef, config.kl_target
        self.controller = (
            AdaptiveKLController(start, target, config.kl_horizon) if target else FixedKLController(start)
        )
        self.reward_scale = PPORewards(config)
        super().__init__(model, config, examples, tokenizer=tokenizer, **options)
        self.episodes = 0

    def build_scorer(self, model: Any) -> nn.Module:
        """Policy, reference and value model as one module."""
        scorer = super().build_scorer(model)
        return ActorCritic(scorer, self.value_model)  # pyright: ignore[reportArgumentType]

    def forward(self, batch: PackedBatch, **options: Any) -> Any:
        """Log-probs of policy or reference, or with `values` those and values; see `ActorCritic`."""
        scores = super().forward(batch, **{"values": False, **options})
        return scores if options.get("values") else scores.policy

    def compute_advantages(self, completions: Sequence[Completion], table: StepTable) -> dict[str, float]:
        """Values, token rewards and advantages of a step's completions."""
        self.compute_known_logps(completions, reference=self.config.needs_reference)
        self._value(completions)
        metrics = compute_token_advantages(
            completions,
            table,
            self.config,
            scores=self.reward_scale(table),
            controller=self.controller,
            parallel=self.parallel,
        )
        self.episodes += len(table.total)
        return metrics | {"episode": float(self.episodes)}

    def num_loss_terms(self, batch: PackedBatch, examples: Sequence[Any]) -> int:
        """Tokens that count."""
        return sum(each.length for each in examples if each.weight)

    def loss(self, batch: PackedBatch, examples: Sequence[Any]) -> LossOutput:
        """The clipped losses of policy and values, and TRL's metrics."""
        config, device = self.config, self.device
        asked = {"with_entropy": config.entropy_coef > 0, "with_stats": config.entropy_coef == 0}
        scores = self.forward(batch, values=True, temperature=config.temperature, **asked)
        logps, entropy = scores.policy.logps, scores.policy.entropy
        old_logps = flat("old_logps", examples, device)
        weights = spread([each.weight for each in examples], examples, device)
        advantages = flat("advantages", examples, device)
        correction = None
        if self.corrects_sampling:
            sampled = flat("sampling_logps", examples, device)
            correction = sampling_correction(old_logps, sampled, batch.score_sequence, config)
            advantages = advantages * correction.weights
        policy = clipped_policy_loss(
            logps,
            old_logps,
            advantages,
            clip_low=config.cliprange,
            clip_high=config.cliprange,
            weights=weights,
        )
        value = value_loss(
            scores.values,
            flat("old_values", examples, device),
            flat("returns", examples, device),
            clip_range=math.inf if config.cliprange_value is None else config.cliprange_value,
            weights=weights,
        )
        loss = policy.loss + config.vf_coef * value.loss
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (weights * entropy).sum()
        if config.kl_coef and config.kl_penalty == "loss":
            kl = KL_ESTIMATORS[config.kl_estimator](logps, flat("ref_logps", examples, device))
            loss = loss + self.controller.value * (weights * kl).sum()
        ratio = policy_ratio(logps.detach(), old_logps)
        clipped = policy.clipped_low + policy.clipped_high
        sums = {
            "loss/policy_avg": policy.loss,
            "loss/value_avg": value.loss,
            "policy/approxkl_avg": policy.approx_kl,
            "policy/clipfrac_avg": clipped,
            "policy/entropy_avg": (weights * entropy.detach()).sum(),
            "val/clipfrac_avg": value.clipped,
            "val/ratio": (weights * ratio).sum(),
            "val/ratio_var": (weights * ratio.square()).sum(),
        }
        output = LossOutput(loss, sums={name: total.detach() for name, total in sums.items()})
        return with_correction(output, correction)

    def update(self, completions: Sequence[Completion], num_prompts: int) -> dict[str, float]:
        """See `OnlineTrainer.update`; `val/ratio_var` is the variance over tokens and updates."""
        metrics = super().update(completions, num_prompts)
        if "val/ratio" in metrics:  # not of a rollout whose completions are all masked
            metrics["val/ratio_var"] = max(0.0, metrics["val/ratio_var"] - metrics["val/ratio"] ** 2)
        return metrics

    def exceeds_target_kl(self, metrics: Mapping[str, float]) -> bool:
        """Whether the KL to the sampling policy is above `target_kl`."""
        return self.config.target_kl is not None and metrics["policy/approxkl_avg"] > self.config.target_kl

    def extra_state(self) -> dict[str, Any]:
        """Controllers, running moments and counters."""
        own = {"controller": self.controller.state(), "rewards": self.reward_scale.state()}
        return super().extra_state() | own | {"episodes": self.episodes}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `extra_state` returned."""
        super().load_extra_state(state)
        self.controller.load_state(state["controller"])
        self.reward_scale.load_state(state["rewards"])
        self.episodes = state["episodes"]

    def save_weights(self, folder: Path) -> None:
        """Write the policy, and the value model into `value_model`."""
        super().save_weights(folder)
        self.value_model.save_pretrained(folder / "value_model")

    def load_weights(self, folder: Path) -> None:
        """Load the weights of a checkpoint into policy and value model."""
        super().load_weights(folder)
        load_weights(self.value_model, folder / "value_model")

    def _value(self, completions: Sequence[Completion]) -> None:
        """Set `old_values` of completions, from the current value model."""
        share = self._cut(completions, lambda: self._filler(completions))
        with torch.no_grad():
            for batch, members, real in share.batches:
                scores = self.forward(batch.to(self.device), values=True, policy=False)
                keep_tokens("old_values", scores.values, members, real)


def start_value_model(model: Any, tokenizer: Any, config: PPOConfig) -> ValueModel | ValueHead:
    """A value model for a policy: a head on its trunk, or its trunk copied under a head.

    Adapters of the policy are left out; a quantised trunk is loaded again, as it cannot be copied.
    """
    sharded = is_deferred(model)
    if config.value_model == "shared":
        head = ValueHead(model.config.get_text_config().hidden_size, seed=config.seed)
        return head if sharded else head.to(model.device)
    options: dict[str, Any] = {"sharded": True} if sharded else {"device": model.device}
    if config.value_model_path:
        return ValueModel.from_pretrained(config.value_model_path, dtype=model.dtype, **options)
    if getattr(model, "is_quantized", False):
        for bits in ("load_in_8bit", "load_in_4bit"):
            options[bits] = getattr(model, bits.replace("load", "is_loaded"), False)
        options |= {"dtype": model.dtype, "seed": config.seed}
        return ValueModel.from_language_model(model.name_or_path, **options)
    trunk = copy.deepcopy(model).unload() if hasattr(model, "peft_config") else model
    return ValueModel.from_backbone(trunk, tokenizer, seed=config.seed)
