"""Training settings of a MinMax run: length, optimizer steps, evaluation, checkpoints."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, model_validator

from rlhf_algos import HardwareConfig, Optim, ReportConfig, SelectionConfig
from rlhf_data import BaseConfig, LocalPath

TIME_SCALE_LIMIT = 10
_MOST_WARMUP_STEPS = 8


class GameLoopConfig(BaseConfig):
    """Learning rates, sizes and schedule."""

    policy_learning_rate: float = Field(default=3e-3, gt=0)
    """AdamW learning rate of the policy."""
    monitor_learning_rate: float = Field(default=3e-3, gt=0)
    """AdamW learning rate of the monitor."""
    monitor_updates_per_policy: int = Field(default=5, ge=0)
    """Maximum number of monitor updates on a batch of critiques; the KL stop may end them; 0 freezes it."""
    policy_updates: int = Field(default=2, ge=1)
    """Updates of the policy on one batch of answers."""
    monitor_warmup_steps: int | None = Field(default=None, ge=0)
    """First steps, in which only the monitor learns; null: a quarter of the run's steps, at most 8."""
    monitor_steps: int | None = Field(default=None, ge=1)
    """Steps after which the monitor no longer learns; null: it always does."""
    constraint_penalty_lambda: float = Field(default=5.0, ge=0)
    """Multiplier λ at the start."""
    batch_size: int = Field(default=32, ge=1)
    """Stories per step."""
    num_epochs: float = Field(default=1.0, gt=0)
    """Passes over the training stories."""
    max_steps: int = Field(default=-1, ge=-1)
    """Steps; above 0 it replaces num_epochs."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum 2-norm of the gradient, to which a longer one is scaled down."""
    max_tokens_per_batch: int = Field(default=16384, ge=1)
    """Tokens in one forward pass."""
    max_kv_tokens: int = Field(default=1 << 18, ge=1)
    """Tokens whose keys and values a player's sampling holds at a time."""
    prompts_per_batch: int | None = Field(default=None, ge=1)
    """Prompts sampled together; null: all of a pass, or 1 with rollout workers, each of which gets a batch.
    Equal batches give equal bits, with workers or without."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Evaluate on the held-out stories every N steps; null: only at start and end."""
    save_steps: int | None = Field(default=10, ge=1)
    """Write a checkpoint every N steps; null: only at the end."""
    save_total_limit: int = Field(default=2, ge=1)
    """Checkpoints kept: the newest, and the best one if evaluations are compared."""
    full_determinism: bool = False
    """On a GPU: kernels that give the same bits every time, so that a resumed run repeats one that was not
    stopped; slower. On a CPU it is always so."""
    deepspeed: LocalPath | None = None
    """JSON file of DeepSpeed settings (ZeRO-1, 2 or 3); run under torchrun."""
    fsdp: bool = False
    """Shard all models, their gradients and moments over the processes (FSDP2); run under torchrun."""
    fsdp_cpu_offload: bool = False
    """Keep the shards, their gradients and the optimizer in main memory; needs fsdp."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        self.hardware()
        return self

    def hardware(self) -> HardwareConfig:
        """How the models are sharded; trained weights are computed in fp32, frozen ones as loaded."""
        sharding = {"fsdp": self.fsdp, "fsdp_cpu_offload": self.fsdp_cpu_offload}
        return HardwareConfig(deepspeed=self.deepspeed, bf16=False, fp16=False, **sharding)

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold a part of the models or of the optimizer each."""
        return self.fsdp or self.deepspeed is not None

    def num_steps(self, num_stories: int, *, adversary: bool = True) -> int:
        """Steps of a run; without a monitor, as many as the policy learns in after the monitor's warm-up."""
        total = self.max_steps
        if total < 1:
            total = max(1, math.ceil(self.num_epochs * self.num_steps_per_epoch(num_stories)))
        return total if adversary else max(1, total - self.num_warmup_steps(total))

    def num_warmup_steps(self, steps: int) -> int:
        """How many of the first steps only the monitor learns in, for a game of `steps` steps."""
        if self.monitor_warmup_steps is not None:
            return self.monitor_warmup_steps
        return min(_MOST_WARMUP_STEPS, steps // 4)

    def num_steps_per_epoch(self, num_stories: int) -> int:
        """Steps of one pass over the stories; the last may hold fewer than `batch_size`."""
        return math.ceil(num_stories / self.batch_size)

    @property
    def time_scale_ratio(self) -> float:
        """How much further than the policy the monitor may move in a step: rates times updates, divided."""
        monitor = self.monitor_learning_rate * self.monitor_updates_per_policy
        return monitor / (self.policy_learning_rate * self.policy_updates)

    def time_scale_warning(self) -> str | None:
        """Warning about a ratio of the two time scales above 10 or below 1/10; None for one in between.

        Two time scales (arXiv:1706.08500) let the monitor follow the policy; too far apart, one barely moves.
        """
        ratio = self.time_scale_ratio
        if ratio == 0 or 1 / TIME_SCALE_LIMIT <= ratio <= TIME_SCALE_LIMIT:
            return None
        fast, slow = ("monitor", "policy") if ratio > 1 else ("policy", "monitor")
        return (
            f"the {fast} may move {max(ratio, 1 / ratio):.0f} times as far per step as the {slow}, which "
            "hardly learns then; bring training.monitor_learning_rate x monitor_updates_per_policy nearer to "
            "policy_learning_rate x policy_updates"
        )


class TrainingConfig(ReportConfig, SelectionConfig, GameLoopConfig):
    """Learning rates, sizes and schedule; which evaluation is the best, trackers, debug switches."""

    optim: Optim = "adamw_torch"
    """Optimizer of both players: torch's AdamW (fused), or one of bitsandbytes."""
    metric_for_best_model: str = "policy/accuracy"
    """Evaluation metric that selects the best checkpoint, with or without `eval_` in front."""

    @property
    def best_metric_name(self) -> str:
        """The evaluation metric that says which checkpoint is best, `eval_` in front."""
        return f"eval_{self.metric_for_best_model.removeprefix('eval_').removeprefix('eval/')}"

    @property
    def compares_evaluations(self) -> bool:
        """Whether anything follows from which evaluation is the best."""
        return self.load_best_model_at_end or self.early_stopping_patience is not None
