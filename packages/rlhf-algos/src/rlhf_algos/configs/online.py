"""Settings of the online methods; the names are those of TRL, and most defaults too."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_algos.configs.trainer import PolicyConfig
from rlhf_algos.kl_control import check_horizon
from rlhf_algos.process_group import world_size
from rlhf_data import BaseConfig, LocalPath, Strings, model_folder

_CISPO_BOUND = 5.0
"""Recommended by ScaleRL (https://arxiv.org/abs/2510.13786) and TRL."""


class SamplingConfig(BaseConfig):
    """How completions are sampled."""

    max_prompt_length: int | None = Field(default=None, ge=1)
    """Maximum prompt length in tokens; longer prompts are left out. Null: as long as the context allows."""
    max_completion_length: int = Field(default=256, ge=1)
    """Maximum completion length in tokens; a completion that reaches it without an end token is truncated."""
    min_completion_length: int = Field(default=0, ge=0)
    """Minimum completion length in tokens."""
    num_generations_eval: int = Field(default=1, ge=1, le=65536)
    """Completions per prompt in evaluation."""
    eval_temperature: float | None = Field(default=None, ge=0)
    """Temperature in evaluation; 0 is greedy; null takes `temperature`."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, when sampling and when scoring what was sampled."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens that together have this probability; 1: from all."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the N most likely tokens; 0: from all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Minimum probability of a token, relative to the most likely one."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Above 1, tokens that already occurred become less likely."""
    stop: Strings = ()
    """Texts that end a completion, in addition to the end token."""
    max_kv_tokens: int = Field(default=1 << 18, ge=1)
    """Tokens in the KV cache at a time; transformers engine only."""
    prompts_per_batch: int | None = Field(default=None, ge=1)
    """Prompts sampled together, and scored; null: all of a step, or 1 with rollout workers, each of which
    gets a batch.  Equal batches give equal bits, with workers or without."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.min_completion_length > self.max_completion_length:
            raise ValueError(
                f"min_completion_length {self.min_completion_length} is above max_completion_length "
                f"{self.max_completion_length}; lower it"
            )
        return self


class VLLMConfig(BaseConfig):
    """Sampling with vLLM."""

    use_vllm: bool = False
    """Sample with vLLM instead of the transformers engine; it gets the weights before every rollout."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """In this process, or on a server that `vllm_server_base_url` names."""
    vllm_server_base_url: str | None = None
    """Address of the server, such as http://localhost:8000; null starts one here."""
    vllm_server_timeout: float = Field(default=240.0, gt=0)
    """Seconds without an answer after which vLLM counts as lost."""
    vllm_gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Share of the GPU's memory for vLLM; on CPUs, of the machine's."""
    vllm_kv_cache_gib: float | None = Field(default=None, gt=0)
    """Size of vLLM's KV cache in GiB; null takes what the memory share leaves."""
    vllm_max_model_length: int | None = Field(default=None, ge=2)
    """Maximum prompt plus completion in tokens; null takes the model's context."""
    vllm_tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs that vLLM spreads the model over."""
    vllm_sync_adapters: bool = False
    """Send LoRA adapters, under a new name each time, instead of all weights; needs use_peft."""
    vllm_importance_sampling_correction: bool = True
    """Correct for the difference between vLLM's log-probs and the trainer's."""
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "sequence_mask"
    """Whether ratios outside the bounds are clipped or count as 0, per token or per sequence."""
    vllm_importance_sampling_clip_max: float | None = Field(default=3.0, gt=0)
    """Upper bound of the ratio of trainer to vLLM; null for none."""
    vllm_importance_sampling_clip_min: float | None = Field(default=None, ge=0)
    """Lower bound of that ratio; null for none."""

    @model_validator(mode="after")
    def _server_is_used(self) -> Self:
        if self.vllm_server_base_url and not (self.use_vllm and self.vllm_mode == "server"):
            raise ValueError("vllm_server_base_url needs use_vllm=true and vllm_mode=server")
        return self


class OnlineConfig(SamplingConfig, VLLMConfig, PolicyConfig):
    """Settings of training on the model's own completions; a step is one rollout and all its updates."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    num_train_epochs: float = Field(default=1.0, gt=0)
    """Passes over the prompts; a fraction ends inside an epoch."""
    metric_for_best_model: str = "reward"
    """Evaluation metric that selects the best checkpoint, with or without `eval_` in front."""
    num_generations: int = Field(default=8, ge=1, le=65536)
    """Completions per prompt."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward function; null: all 1."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Last tokens of `max_completion_length`, over which a penalty grows from 0 to 1; null for none."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off at `max_completion_length` out of the loss."""
    disable_dropout: bool = True
    """Disable dropout, including the adapters'."""
    speculation: Literal["previous"] | None = None
    """Guess that a prompt's completions are those of the epoch before, and compute them in few passes; what
    is sampled stays the same. Transformers engine only, in one process. Null decodes token by token."""
    common_random_numbers: bool = False
    """Sample a prompt with the same random numbers in every epoch, so that completions change only where the
    policy did; epochs are then no longer independent of each other."""

    @field_validator("reward_weights", mode="before")
    @classmethod
    def _one_weight(cls, value: object) -> object:
        return (value,) if isinstance(value, int | float) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_text(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("an empty text stops nothing; leave it out")
        return stop

    @model_validator(mode="after")
    def _can_speculate(self) -> Self:
        if self.speculation and self.use_vllm:
            raise ValueError("speculation is for the transformers engine; leave out speculation or use_vllm")
        if self.speculation and self.repetition_penalty != 1:
            raise ValueError("speculation does not go with a repetition_penalty; leave out one of them")
        if self.speculation and world_size() > 1:  # a prompt may come to another process in the next epoch
            raise ValueError(f"speculation needs one process, and there are {world_size()}; leave it out")
        return self

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.overlong_buffer and self.overlong_buffer > self.max_completion_length:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} is above max_completion_length "
                f"{self.max_completion_length}; lower it"
            )
        return self

    @property
    def max_length(self) -> int | None:
        """Tokens of prompt and completion at most, where the prompt has a limit."""
        return self.max_prompt_length and self.max_prompt_length + self.max_completion_length

    @property
    def passes(self) -> int:
        """Passes over each rollout."""
        raise NotImplementedError

    @property
    def mini_batches(self) -> int:
        """Optimizer steps in each pass."""
        raise NotImplementedError

    def prompts_per_step(self, processes: int) -> int:
        """Prompts of a rollout, over all processes.

        Raises:
            ValueError: the completions of an optimizer step are not whole groups.
        """
        size = self.per_device_train_batch_size * self.gradient_accumulation_steps * processes
        if size % self.num_generations:
            raise ValueError(
                f"an optimizer step takes {size} completions (per_device_train_batch_size x "
                f"gradient_accumulation_steps x processes), which is not a multiple of num_generations "
                f"{self.num_generations}; change one of them"
            )
        return size // self.num_generations * self.mini_batches


class GRPOConfig(OnlineConfig):
    """Settings of group-relative policy optimisation and its relatives."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL is estimated from the sampled tokens."""
    use_bias_correction_kl: bool = True
    """Multiply the KL by the ratio of the policies, which makes its gradient unbiased."""
    router_aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss of a mixture-of-experts model; null takes the model config's."""
    num_iterations: int = Field(default=1, ge=1)
    """Passes over each rollout."""
    steps_per_generation: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a rollout."""
    epsilon: float | None = Field(default=0.2, ge=0)
    """Lower clipping bound, 1 - epsilon; null does not clip."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """Upper bound, 1 + epsilon_high; null takes epsilon.  With cispo epsilon_high itself; null takes 5."""
    delta: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio whatever the advantage's sign; null for none."""
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo"] = "dapo"
    """Weight of a token: 1 / length (grpo, sapo), equal (dapo, bnpo, cispo), or 1 / max_completion_length
    (dr_grpo); cispo bounds the weight of a token and not its gradient, sapo bounds the ratio softly."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0)
    """How fast sapo's bound closes on a ratio that moves away from 1, where the advantage is positive."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0)
    """The same where the advantage is not positive."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """The ratio of each token, or one of the whole completion (GSPO)."""
    advantage_estimator: Literal["grpo", "rloo"] = "grpo"
    """The baseline is the mean of the group, or of the others in it (RLOO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the group, of the batch, or not at all."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, the mean entropy of a token in nats; the same for every `loss_type`."""

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _yes_or_no(cls, value: object) -> object:
        return {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _has_groups(self) -> Self:
        if self.num_generations < 2:
            raise ValueError("num_generations is 1, but a group needs two completions or more; raise it")
        if self.epsilon is None and self.epsilon_high is not None:
            raise ValueError("epsilon_high is set without epsilon; set both or none")
        if self.delta is not None and self.loss_type in ("cispo", "sapo"):
            raise ValueError(f"delta has no meaning with loss_type {self.loss_type}; leave it out")
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            if self.loss_type != "sapo" and getattr(self, name) != GRPOConfig.model_fields[name].default:
                raise ValueError(
                    f"{name} has no meaning with loss_type {self.loss_type}; leave it out, or take sapo"
                )
        return self

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """How far the ratio of the policies counts below and above 1."""
        if self.epsilon is None:
            return math.inf, math.inf
        if self.loss_type == "cispo":
            return math.inf, (_CISPO_BOUND if self.epsilon_high is None else self.epsilon_high) - 1
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_reference(self) -> bool:
        """Where its KL counts."""
        return self.beta > 0

    @property
    def passes(self) -> int:
        """`num_iterations`."""
        return self.num_iterations

    @property
    def mini_batches(self) -> int:
        """`steps_per_generation`."""
        return self.steps_per_generation


class PPOConfig(OnlineConfig):
    """Settings of proximal policy optimisation with a value model."""

    learning_rate: float = Field(default=3e-6, gt=0)
    """Peak learning rate of AdamW, of policy and value model."""
    num_generations: int = Field(default=1, ge=1, le=65536)
    """Completions per prompt."""
    num_ppo_epochs: int = Field(default=4, ge=1)
    """Passes over each rollout."""
    num_mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a rollout."""
    value_model: Literal["separate", "shared"] = "separate"
    """A value model with its own trunk, or a head on the policy's."""
    value_model_path: LocalPath | None = None
    """Folder or hub name to start the value model from, such as a reward model's; null takes the policy."""
    kl_coef: float = Field(default=0.05, ge=0)
    """Weight of the KL to the reference; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How the KL is estimated from the sampled tokens."""
    kl_penalty: Literal["reward", "loss"] = "reward"
    """Use of the KL: in the reward of every token, or as a term of the loss."""
    kl_target: float | None = Field(default=None, gt=0)
    """Target KL in nats per completion, to which `kl_coef` adapts; null keeps it constant."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Completions over which `kl_coef` adapts."""
    target_kl: float | None = Field(default=None, gt=0)
    """KL from the sampling policy, nats per token, that ends a rollout's updates; null for no limit."""
    cliprange: float = Field(default=0.2, ge=0)
    """Clipping bounds of the ratio, 1 - cliprange and 1 + cliprange."""
    cliprange_value: float | None = Field(default=0.2, ge=0)
    """How far a value may move from the old one, in units of reward; null does not clip."""
    vf_coef: float = Field(default=0.1, ge=0)
    """Weight of the value loss."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's weight of later errors."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a rollout to mean 0 and deviation 1."""
    whiten_rewards: bool = False
    """Scale the token rewards of a rollout around their mean to deviation 1."""
    missing_eos_penalty: float | None = Field(default=None, ge=0)
    """Subtracted from the reward of a completion without an end token; null for none."""
    cliprange_reward: float | None = Field(default=None, gt=0)
    """Rewards are clipped to this range around 0; null for none."""
    normalize_rewards: bool = False
    """Divide rewards by their deviation since the start of training."""

    @field_validator("value_model_path")
    @classmethod
    def _value_model_of_a_run(cls, name: str | None) -> str | None:
        return name and model_folder(name)

    @model_validator(mode="after")
    def _has_a_use(self) -> Self:
        if self.kl_penalty == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "k1 has no gradient in the loss; take kl_estimator k2 or k3, or kl_penalty=reward"
            )
        if self.kl_target and not self.kl_coef:
            raise ValueError("kl_target adapts kl_coef, which is 0 and would stay so; set kl_coef")
        self._check_horizon()
        if self.value_model_path and self.value_model == "shared":
            raise ValueError(
                "value_model_path is for a separate value model; leave it out or set value_model"
            )
        return self

    def _check_horizon(self) -> None:
        if self.kl_target is None:
            return
        completions = (
            self.per_device_train_batch_size
            * self.gradient_accumulation_steps
            * self.num_mini_batches
            * world_size()
        )
        try:
            check_horizon(completions, self.kl_horizon)
        except ValueError as error:
            raise ValueError(
                f"kl_horizon is {self.kl_horizon} completions, too few for rollouts of {completions}; "
                f"set it above {completions // 5}, better to many times a rollout"
            ) from error

    @property
    def needs_reference(self) -> bool:
        """Where its KL counts."""
        return self.kl_coef > 0

    @property
    def passes(self) -> int:
        """`num_ppo_epochs`."""
        return self.num_ppo_epochs

    @property
    def mini_batches(self) -> int:
        """`num_mini_batches`."""
        return self.num_mini_batches
