"""What every trainer's config shares; the names are those of TRL and transformers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_data import BaseConfig, LocalPath

__all__ = [
    "HardwareConfig",
    "LanguageModelConfig",
    "LoopConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "ReportConfig",
    "SelectionConfig",
    "TrackingConfig",
    "TrainerConfig",
]


class OptimizerConfig(BaseConfig):
    """Optimizer and learning-rate schedule."""

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
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's mean of squared gradients."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient of a step is scaled down to this 2-norm when it is longer."""
    optim: Literal["adamw_torch", "adamw_bnb_8bit"] = "adamw_torch"
    """AdamW of torch (fused), or that of bitsandbytes, which keeps its moments in 8 bits."""


class StepsConfig(BaseConfig):
    """Steps, epochs, how often is evaluated and saved."""

    per_device_train_batch_size: int = Field(default=8, ge=1)
    """Examples per optimizer step, accumulation step and process; only the product of the three matters."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Factor on `per_device_train_batch_size`; memory is ruled by `max_tokens_per_batch` alone."""
    max_tokens_per_batch: int | None = Field(default=16384, ge=1)
    """Tokens in one forward pass; a longer example is taken alone; null means one pass per step."""
    num_train_epochs: float = Field(default=3.0, gt=0)
    """Passes over the training examples; a fraction ends inside an epoch."""
    max_steps: int = Field(default=-1, ge=-1)
    """Optimizer steps; above 0 it takes the place of `num_train_epochs`."""
    shuffle: bool = True
    """Take the examples in a new random order each epoch; false takes them as they come."""
    seed: int = Field(default=42, ge=0)
    """Seed of the data order and of dropout."""
    dataloader_num_workers: int = Field(default=1, ge=0)
    """Threads of each process that read and tokenise streamed rows ahead of the step; 0 reads them in it."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Evaluate every N steps, and at the end; null means at the end only."""
    save_steps: int | None = Field(default=500, ge=1)
    """Write a checkpoint every N steps, and at the end; null means at the end only."""
    save_total_limit: int | None = Field(default=2, ge=1)
    """Checkpoints kept: the newest ones, and the best one besides; null keeps all."""


class SelectionConfig(BaseConfig):
    """Which of a training's evaluations is the best, and what follows from it."""

    metric_for_best_model: str = "loss"
    """Evaluation metric that says which checkpoint is best, with or without `eval_` in front."""
    greater_is_better: bool | None = None
    """Whether more of that metric is better; null means yes, unless its name ends in `loss`."""
    load_best_model_at_end: bool = False
    """Take the weights of the best checkpoint when training ends; saves at every evaluation."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations in a row without an improvement; null never stops."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """What the metric must change by to count as an improvement."""


class LoopConfig(SelectionConfig, StepsConfig):
    """Steps, epochs, evaluation, checkpoints."""


class HardwareConfig(BaseConfig):
    """Precision, memory, processes."""

    bf16: bool | None = None
    """Compute in bfloat16 (weights stay in fp32); null means on GPUs made for it and for bfloat16 weights."""
    fp16: bool | None = None
    """Compute in float16 with a scaled loss; null means on GPUs that have no bfloat16."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time."""
    torch_compile: bool = False
    """Compile the model's layers with torch.compile; pays on GPUs and long runs."""
    deepspeed: LocalPath | None = None
    """JSON file of DeepSpeed settings (ZeRO-1, 2 or 3); run under torchrun."""
    fsdp: bool = False
    """Shard the model over the processes (FSDP2); run under torchrun."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both true; choose one")
        if self.deepspeed and self.fsdp:
            raise ValueError("deepspeed and fsdp are both set; choose one")
        return self


class ReportConfig(BaseConfig):
    """What is logged, and how often."""

    logging_steps: int = Field(default=1, ge=1)
    """Write a line of metrics every N steps."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that get the metrics besides metrics.jsonl; a single name will do, `none` is none."""
    debug_gradient_flow: int | None = Field(default=None, ge=1)
    """Draw the gradient norm of every layer every N steps; null never."""
    debug_activations: int | None = Field(default=None, ge=1)
    """Draw histograms of every layer's output every N steps; null never."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_tracker(cls, value: object) -> object:
        if isinstance(value, str):
            return () if value == "none" else (value,)
        return value


class TrackingConfig(ReportConfig):
    """What is logged, and how often, samples among it."""

    sample_steps: int | None = Field(default=None, ge=1)
    """Write what the model answers to a few prompts every N steps; null never."""


class TrainerConfig(OptimizerConfig, LoopConfig, HardwareConfig, TrackingConfig):
    """Everything a trainer needs that is not its method's own."""

    @model_validator(mode="after")
    def _whole_where_needed(self) -> Self:
        if self.load_best_model_at_end and (self.fsdp or self.deepspeed):
            raise ValueError(
                "load_best_model_at_end needs a model that is not sharded; leave one of them out"
            )
        if self.optim == "adamw_bnb_8bit" and (self.fsdp or self.deepspeed):
            raise ValueError("adamw_bnb_8bit cannot be sharded; take adamw_torch with fsdp and deepspeed")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether training computes with a reference; it is the model itself where that has adapters."""
        return False


class PolicyConfig(TrainerConfig):
    """Settings of training a language model, on given completions or on its own."""

    ref_kl_rows: int = Field(default=32, ge=0)
    """Held-out rows on which evaluation measures the KL to the model as it was at the start; 0 for none."""
    stage_samples: int = Field(default=8, ge=0)
    """Prompts whose completions are kept from the start and the end of training; 0 for none."""


class LanguageModelConfig(PolicyConfig):
    """Settings of training a language model on completions that are given."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    max_length: int | None = Field(default=1024, ge=2)
    """Tokens kept of prompt and completion, from the start; null keeps all."""
    router_aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss of a model with experts; null takes that in the model's config."""
    disable_dropout: bool = True
    """Train without dropout, the adapters' too."""
