"""From scores of completions to rewards, returns and advantages of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_algos.advantages import (
    explained_variance,
    gae,
    moments,
    overlong_penalty,
    scale_with,
    standardise_with,
)
from rlhf_algos.configs.online import PPOConfig
from rlhf_algos.kl_control import KLController
from rlhf_algos.losses import KL_ESTIMATORS, KLEstimator
from rlhf_algos.online.rollouts import Completion, StepTable, flat, spread
from rlhf_algos.parallel.parallel import Parallel

_CPU = torch.device("cpu")


class PPORewards:
    """Scales scores by their running standard deviation, clips them, and subtracts penalties."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.moments = torch.zeros(3, dtype=torch.float64)

    def __call__(self, table: StepTable) -> Tensor:
        """(B,) scores of a step's completions; the step's scores join the running moments first."""
        config, scores = self.config, table.total
        if config.normalize_rewards:
            self.moments = self.moments + moments(scores)
            scores = scale_with(scores, self.moments)
        if config.cliprange_reward is not None:
            scores = scores.clamp(-config.cliprange_reward, config.cliprange_reward)
        if config.missing_eos_penalty is not None:
            scores = scores - config.missing_eos_penalty * ~table.ended
        if config.overlong_buffer:
            longest = config.max_completion_length
            scores = scores + overlong_penalty(
                table.lengths, max_length=longest, buffer=config.overlong_buffer
            )
        return scores

    def state(self) -> dict[str, list[float]]:
        """The running moments."""
        return {"moments": self.moments.tolist()}

    def load_state(self, state: dict[str, list[float]]) -> None:
        """Load what `state` returned."""
        self.moments = torch.tensor(state["moments"], dtype=torch.float64)


def compute_token_advantages(
    completions: Sequence[Completion],
    table: StepTable,
    config: PPOConfig,
    *,
    scores: Tensor,
    controller: KLController,
    parallel: Parallel,
) -> dict[str, float]:
    """Give this process's completions `advantages` and `returns`; metrics of the whole step.

    r_t = -β kl_t, plus the completion's score at its last token (https://arxiv.org/abs/1909.08593); without
    the KL term where `kl_penalty` puts it into the loss.  Advantages: `gae`.

    Completions have `old_logps`, `old_values` and, where a KL counts, `ref_logps`; `scores` (B,) are of the
    whole step, from `PPORewards`; the controller is updated.
    """
    for each in completions:
        each.weight = float(not (config.mask_truncated_completions and each.truncated))
    lengths = torch.tensor([completion.length for completion in completions], dtype=torch.long)
    kl = old_logps = values = torch.zeros(0)
    if completions:
        kl = _divergence(config.kl_estimator, completions)
        old_logps, values = (flat(name, completions, _CPU) for name in ("old_logps", "old_values"))
    penalty = controller.value * kl if config.kl_penalty == "reward" else torch.zeros_like(kl)
    rewards = -penalty
    rewards[lengths.cumsum(0) - 1] += scores[[completion.index for completion in completions]]
    if config.whiten_rewards:
        rewards = standardise_with(rewards, _summed(parallel, moments(rewards)), shift_mean=False)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    estimate = gae(rewards, values, sequence, gamma=config.gamma, lam=config.lam)
    advantages = estimate.advantages
    if config.whiten_advantages:
        counted = spread([completion.weight for completion in completions], completions, _CPU) > 0
        advantages = standardise_with(advantages, _summed(parallel, moments(advantages[counted])))
    for name, tokens in (("advantages", advantages), ("returns", estimate.returns)):
        for completion, part in zip(completions, tokens.split(lengths.tolist()), strict=True):
            completion.tokens[name] = part
    variance = _summed(parallel, moments(estimate.returns))
    errors = _summed(parallel, moments(estimate.returns - values))
    totals = torch.stack([kl.sum(), -old_logps.sum(), -penalty.sum(), advantages.abs().sum()])
    *means, magnitude = _summed(parallel, totals.double()).tolist()
    mean_kl, entropy, non_score = (mean / len(table.total) for mean in means)
    metrics = {
        "objective/kl": mean_kl,
        "objective/entropy": entropy,
        "objective/scores": float(table.total.mean()),
        "objective/non_score_reward": non_score,
        "objective/rlhf_reward": non_score + float(scores.mean()),
        "val/num_eos_tokens": float(table.ended.sum()),
        "kl_coef": controller.value,
        "advantage_abs_mean": magnitude / float(table.lengths.sum()),
    }
    if (explained := float(explained_variance(variance, errors))) == explained:
        metrics["val/explained_variance"] = explained
    controller.update(mean_kl, len(table.total))
    return metrics


def _divergence(estimator: KLEstimator, completions: Sequence[Completion]) -> Tensor:
    """(M,) the KL estimate of each token; 0 without a reference."""
    old_logps = flat("old_logps", completions, _CPU)
    if "ref_logps" not in completions[0].tokens:
        return torch.zeros_like(old_logps)
    return KL_ESTIMATORS[estimator](old_logps, flat("ref_logps", completions, _CPU))


def _summed(parallel: Parallel, values: Tensor) -> Tensor:
    """The sum over processes, on the CPU."""
    if parallel.world_size == 1:
        return values
    return parallel.sum(values.to(parallel.device)).cpu()
