"""Settings of every trainer; the names are those of TRL and transformers."""

from __future__ import annotations

import os
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_data import BaseConfig, LocalPath, Strings

Optim = Literal["adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
"""Optimizers by the names that transformers gives them."""


class OptimizerConfig(BaseConfig):
    """Optimizer and learning-rate schedule."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Decay of the learning rate after the warm-up: none, or to zero linearly or as a half cosine."""
    warmup_steps: float = Field(default=0, ge=0)
    """Steps of the learning rate's linear rise from zero; below 1, a fraction of all steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; biases and norms have none."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, added to the root of the second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum 2-norm of a step's gradient, to which a longer one is scaled down."""
    optim: Optim = "adamw_torch"
    """torch's AdamW (fused), or bitsandbytes' with moments in 8 bits, or paged out where memory is short."""


class StepsConfig(BaseConfig):
    """Steps, epochs, evaluation and checkpoint intervals."""

    per_device_train_batch_size: int = Field(default=8, ge=1)
    """Examples per optimizer step, accumulation step and process; only the product of the three matters."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Factor on `per_device_train_batch_size`; only `max_tokens_per_batch` affects memory."""
    max_tokens_per_batch: int | None = Field(default=16384, ge=1)
    """Tokens in one forward pass; a longer example gets its own pass; null: one pass per step."""
    num_train_epochs: float = Field(default=3.0, gt=0)
    """Passes over the training examples; a fraction ends inside an epoch."""
    max_steps: int = Field(default=-1, ge=-1)
    """Steps: optimizer steps, for online methods rollouts; above 0 it replaces `num_train_epochs`."""
    shuffle: bool = True
    """Shuffle the examples in each epoch; false keeps their order."""
    seed: int = Field(default=42, ge=0, lt=1 << 63)
    """Seed of everything random: data order, dropout, new weights, sampling."""
    dataloader_num_workers: int = Field(default=1, ge=0)
    """Threads of each process that read and tokenise streamed rows ahead of the step; 0 reads them in it."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Evaluate every N steps, and at the end; null: only at the end."""
    save_steps: int | None = Field(default=500, ge=1)
    """Write a checkpoint every N steps, and at the end; null: only at the end."""
    save_total_limit: int | None = Field(default=2, ge=1)
    """Checkpoints kept: the newest ones, and the best one; null keeps all."""


class SelectionConfig(BaseConfig):
    """How evaluations are compared: the best checkpoint, early stopping."""

    metric_for_best_model: str = "loss"
    """Evaluation metric that selects the best checkpoint, with or without `eval_` in front."""
    greater_is_better: bool | None = None
    """Whether a higher value of that metric is better; null: yes, unless its name ends in `loss`."""
    load_best_model_at_end: bool = False
    """Take the weights of the best checkpoint when training ends; saves at every evaluation."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations in a row without an improvement; null never stops."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """Smallest change of the metric that counts as an improvement."""


class LoopConfig(SelectionConfig, StepsConfig):
    """Steps, epochs, evaluation, checkpoints."""


class HardwareConfig(BaseConfig):
    """Precision, memory, processes."""

    bf16: bool | None = None
    """Compute in bfloat16 (weights stay in fp32); null: on GPUs that support it, and for bfloat16 weights."""
    fp16: bool | None = None
    """Compute in float16 with a scaled loss; null: on GPUs without bfloat16."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time."""
    activation_offloading: bool = False
    """Keep the layers' inputs in main memory until the backward pass; needs gradient_checkpointing, a GPU."""
    full_determinism: bool = False
    """On a GPU: kernels that give the same bits every time, so that a resumed run repeats one that was not
    stopped; slower. On a CPU it is always so."""
    torch_compile: bool = False
    """Compile the model's layers with torch.compile; worthwhile on GPUs and in long runs."""
    deepspeed: LocalPath | None = None
    """JSON file of DeepSpeed settings (ZeRO-1, 2 or 3); run under torchrun."""
    fsdp: bool = False
    """Shard the model over the processes (FSDP2); run under torchrun."""
    fsdp_cpu_offload: bool = False
    """Keep the shards, their gradients and the optimizer in main memory; needs fsdp."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both true; choose one")
        if self.deepspeed and self.fsdp:
            raise ValueError("deepspeed and fsdp are both set; choose one")
        if self.activation_offloading and not self.gradient_checkpointing:
            raise ValueError(
                "activation_offloading moves what gradient_checkpointing keeps, and that is off; set both"
            )
        if self.fsdp_cpu_offload and not self.fsdp:
            raise ValueError(
                "fsdp_cpu_offload is set without fsdp; set fsdp too, or offload in the deepspeed file"
            )
        return self


class ReportConfig(BaseConfig):
    """Logging: metrics and intervals."""

    logging_steps: int = Field(default=1, ge=1)
    """Write a line of metrics every N steps."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers in addition to metrics.jsonl; a single name is accepted, `none` disables them."""
    debug_gradient_flow: int | None = Field(default=None, ge=1)
    """Plot the gradient norm of every layer every N steps; null: never."""
    debug_activations: int | None = Field(default=None, ge=1)
    """Plot histograms of every layer's output every N steps; null: never."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_tracker(cls, value: object) -> object:
        if isinstance(value, str):
            return () if value == "none" else (value,)
        return value


class TrackingConfig(ReportConfig):
    """Logging: metrics, intervals and samples."""

    sample_steps: int | None = Field(default=None, ge=1)
    """Write completions of a few prompts every N steps; null: never."""


class TrainerConfig(OptimizerConfig, LoopConfig, HardwareConfig, TrackingConfig):
    """All settings of a trainer that do not belong to its method."""

    @model_validator(mode="after")
    def _whole_where_needed(self) -> Self:
        if self.load_best_model_at_end and (self.fsdp or self.deepspeed):
            raise ValueError(
                "load_best_model_at_end needs a model that is not sharded; leave one of them out"
            )
        if self.optim != "adamw_torch" and (self.fsdp or self.deepspeed):
            raise ValueError(f"{self.optim} cannot be sharded; take adamw_torch with fsdp and deepspeed")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether training computes with a reference; it is the model itself where that has adapters."""
        return False


class CapabilityConfig(BaseConfig):
    """Suites that are measured during training, and how a loss is answered."""

    capability_steps: int | None = Field(default=None, ge=1)
    """Measure capability suites every N steps, and roll back if one has fallen significantly; null: never."""
    capability_suites: Strings = ("stories", "sums", "text")
    """Built-in suites, and `NAME=FILE` for your own; see docs/pipelines.md."""
    capability_rows: int = Field(default=200, ge=8)
    """Items of each built-in suite at most."""
    capability_margin: float = Field(default=0.02, ge=0)
    """Loss of a suite's mean score, since training began, that does not matter."""
    max_rollbacks: int = Field(default=2, ge=0)
    """Maximum number of rollbacks; at the next regression training stops."""

    @field_validator("capability_suites")
    @classmethod
    def _absolute_files(cls, suites: tuple[str, ...]) -> tuple[str, ...]:
        if not suites:
            raise ValueError("name a suite, or leave it out for stories, sums and text")
        parts = (each.partition("=") for each in suites)
        return tuple(f"{name}={os.path.abspath(path)}" if path else name + sign for name, sign, path in parts)


class PolicyConfig(CapabilityConfig, TrainerConfig):
    """Settings of language-model training, on given completions or on its own."""

    ref_kl_rows: int = Field(default=32, ge=0)
    """Held-out rows on which evaluation measures the KL to the starting model; 0 for none."""
    stage_samples: int = Field(default=8, ge=0)
    """Prompts whose completions are saved before and after training; 0 for none."""

    @model_validator(mode="after")
    def _tested_weights_are_taken(self) -> Self:
        if self.capability_steps and self.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end may take weights that capability_steps has not tested; leave one out"
            )
        return self


class ConsolidationConfig(BaseConfig):
    """The penalty on leaving the start, weight by weight."""

    ewc_strength: float = Field(default=0.0, ge=0)
    """Weight of elastic weight consolidation, in units of the loss; 0 for none."""
    ewc_data: LocalPath | None = None
    """Demonstrations of what must not be forgotten, as for sft; null holds every weight equally (L2-SP)."""
    ewc_fisher: Literal["true", "empirical"] = "true"
    """Importance by tokens that the model draws, or by those of the rows."""
    ewc_rows: int = Field(default=256, ge=1)
    """Rows of `ewc_data` that are measured at most."""

    @model_validator(mode="after")
    def _data_has_a_use(self) -> Self:
        if self.ewc_data and not self.ewc_strength:
            raise ValueError("ewc_data is set and ewc_strength is 0; set a strength too")
        return self


class LanguageModelConfig(ConsolidationConfig, PolicyConfig):
    """Settings of language-model training on given completions."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    max_length: int | None = Field(default=1024, ge=2)
    """Tokens kept of prompt and completion, from the start; null keeps all."""
    router_aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss of a mixture-of-experts model; null takes the model config's."""
    disable_dropout: bool = True
    """Disable dropout, including the adapters'."""
