"""What every trainer's config shares; the names are TRL's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_data import BaseConfig

__all__ = ["TrainerConfig"]


class TrainerConfig(BaseConfig):
    """Optimizer, schedule, step size, budget, checkpoints."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate falls after the warm-up: not at all, or to zero in a line or a half cosine."""
    warmup_steps: float = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from zero; below 1 it is a fraction of all steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; biases and norms have none."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient of a step is scaled down to this 2-norm when it is longer."""
    per_device_train_batch_size: int = Field(default=8, ge=1)
    """Examples per optimizer step and accumulation step; only the product of the two matters."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Factor on `per_device_train_batch_size`; memory is ruled by `max_tokens_per_batch` alone."""
    max_tokens_per_batch: int | None = Field(default=16384, ge=1)
    """Tokens in one forward pass; a longer example is taken alone; null means one pass per step."""
    num_train_epochs: float = Field(default=3.0, gt=0)
    """Passes over the training examples; a fraction ends inside an epoch."""
    max_steps: int = Field(default=-1, ge=-1)
    """Optimizer steps; above 0 it takes the place of `num_train_epochs`."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Evaluate every so many steps; null means once, at the end."""
    save_steps: int | None = Field(default=500, ge=1)
    """Write a checkpoint every so many steps, and at the end; null means at the end only."""
    save_total_limit: int | None = Field(default=2, ge=1)
    """Checkpoints kept, the newest; null keeps all."""
    seed: int = Field(default=42, ge=0)
    """Seed of the data order and of dropout."""
