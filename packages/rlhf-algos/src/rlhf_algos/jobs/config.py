"""Settings of a training job: a method's config, the model it starts from and the data it learns from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from rlhf_algos.configs.online import OnlineConfig
from rlhf_algos.configs.trainer import ConsolidationConfig, TrainerConfig
from rlhf_algos.distributed.config import (
    ClusterConfig,
    DistributedConfig,
    check_not_quantised,
    samplers,
)
from rlhf_data import BaseConfig, LocalPath, ModelPath, Strings

ModelKind = Literal["policy", "reward", "judge", "prm"]
"""A language model, a model that scores texts, or one that scores steps."""


class StartModelConfig(BaseConfig):
    """The model that training starts from: a given one, one from scratch, or a tiny one for the rows."""

    model_config = ConfigDict(serialize_by_alias=True)

    model_name_or_path: ModelPath | None = None
    """Model folder, or a name on the Hugging Face hub."""
    scratch: LocalPath | None = Field(default=None, alias="model_config")
    """YAML or JSON file with the shape of a model that starts from random weights."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Dtype that weights are loaded in; `auto`: as stored. Trained ones are fp32, computed in this dtype."""
    load_in_8bit: bool = False
    """Quantise the frozen weights to 8 bits; needs use_peft."""
    load_in_4bit: bool = False
    """Quantise the frozen weights to 4 bits (NF4), as QLoRA does; needs use_peft."""

    chat_template_path: LocalPath | None = None
    """Jinja file (.jinja, .j2), or a tokenizer (folder or hub name) with a template; null keeps it."""
    eos_token: str | None = None
    """Token that ends a text and a turn, such as `<|im_end|>`; it is saved with the model.  Null keeps it."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.model_name_or_path and self.scratch:
            raise ValueError("model_name_or_path and model_config are both set; choose one")
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit are both true; choose one")
        return self


class AdapterConfig(BaseConfig):
    """LoRA adapters instead of full training; the names are those of TRL's command line."""

    use_peft: bool = False
    """Train LoRA adapters on frozen weights."""
    lora_r: int = Field(default=16, ge=1)
    """Rank of the update."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by lora_alpha / lora_r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the adapters' input during training."""
    lora_target_modules: tuple[str, ...] | None = None
    """Names of the layers to adapt, such as `q_proj`; null or all-linear adapts all but the head."""
    use_rslora: bool = False
    """Scale the update by lora_alpha / sqrt(lora_r) instead (arXiv:2312.03732)."""

    @field_validator("lora_target_modules", mode="before")
    @classmethod
    def _one_layer(cls, value: object) -> object:
        if isinstance(value, str):
            return None if value == "all-linear" else (value,)
        if value is not None and not value:
            raise ValueError("name a layer, or give null for all but the head")
        return value


class DataConfig(BaseConfig):
    """Training and held-out rows; without a file they come from the story world."""

    train_data: LocalPath | None = None
    """File (JSON, JSON lines, also `.gz` and `.zst`, CSV, Parquet, Arrow), LMDB folder, folder of shards,
    pattern such as `shards/*.jsonl`, `datasets` folder, or a hub name."""
    eval_data: LocalPath | None = None
    """The same for held-out rows; null holds out a part of the training rows."""
    eval_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the prompts of `train_data` held out if there is no `eval_data`; 0 holds out none."""
    subset_size: int | None = Field(default=None, ge=1)
    """Use the first N rows of `train_data`, for quick runs; null uses all."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Stop at a row that cannot be used, or skip it and count it."""
    columns: dict[str, str | list[str]] = Field(default_factory=dict)
    """Columns of the file under other names, as `columns.chosen=better`; the texts of several are joined."""
    transcripts: Literal["auto", "messages", "text"] = "auto"
    """Turn transcripts (`Human:` and `Assistant:`) and Alpaca rows into chat messages, or learn
    them as texts; `auto` turns them where the tokenizer has a chat template."""
    truncation: Literal["auto", "left", "right", "middle", "drop"] = "auto"
    """Rows too long: left or middle takes turns out of the prompt and keeps completions whole, right
    cuts sequences at their end, drop leaves them out; `auto` as the method does."""
    ties: Literal["keep", "drop", "margin0"] = "keep"
    """Pairs of nearly equal completions: keep them, leave them out, or keep them with margin 0."""
    split: Literal["prompt", "stratified"] = "prompt"
    """Hold out prompts by their hash, or so that the lengths of held-out rows are those of all."""
    streaming: bool = False
    """Read rows from their files when they are needed: JSON lines, Parquet, Arrow, LMDB, one or many files,
    or a `.yaml` file that names sources with weights."""
    streaming_eval_rows: int = Field(default=512, ge=1)
    """Of a streamed set without `eval_data`, held-out rows at most; all of their prompts leave training."""
    story_rows: int = Field(default=2048, ge=2)
    """Training rows of the story world."""
    story_eval_rows: int = Field(default=256, ge=1)
    """Held-out rows of the story world."""

    @model_validator(mode="after")
    def _has_rows_to_hold_out(self) -> Self:
        if self.eval_data and not self.train_data:
            raise ValueError("eval_data is set without train_data; give --train-data too")
        if self.columns and not self.train_data:
            raise ValueError(
                "columns is set without train_data, whose columns it maps; give --train-data too"
            )
        if self.streaming and not self.train_data:
            raise ValueError("streaming is for a file; give --train-data too")
        for key, usual in (("ties", "keep"), ("split", "prompt")):
            if (value := getattr(self, key)) == usual:
                continue
            if not self.train_data:
                raise ValueError(f"{key} is {value}, for the rows of a file; give --train-data too")
        if self.split != "prompt" and self.streaming:
            raise ValueError(
                f"split is {self.split}, which needs all rows in memory, and streaming is true; set one of "
                "them otherwise, or prepare the rows with rlhf-report prepare"
            )
        if self.split != "prompt" and self.eval_data:
            raise ValueError(f"split is {self.split}, and eval_data holds what is held out; leave one out")
        return self


class JobConfig(StartModelConfig, AdapterConfig, DataConfig, TrainerConfig):
    """Settings of every method's job; `job_config` adds the method's own keys."""

    backend: Literal["rlhf", "trl"] = "rlhf"
    """This engine, or TRL's own trainer on the same model and data."""
    distributed: ClusterConfig | None = None
    """Train in processes on a Ray cluster; null trains in the process of the command, or torchrun's."""

    if TYPE_CHECKING:

        @property
        def max_length(self) -> int | None:
            """Tokens of a sequence at most; every method's settings have it."""

    @model_validator(mode="after")
    def _quantised_weights_are_frozen(self) -> Self:
        if (self.load_in_8bit or self.load_in_4bit) and not self.use_peft:
            raise ValueError("quantised weights cannot be trained; set use_peft to train adapters on them")
        if (self.load_in_8bit or self.load_in_4bit) and self.model_name_or_path is None:
            raise ValueError("load_in_8bit and load_in_4bit are for weights from a folder; give --model")
        return self

    @model_validator(mode="after")
    def _weights_can_be_held(self) -> Self:
        if not (isinstance(self, ConsolidationConfig) and self.ewc_strength):
            return self
        if getattr(self, "deepspeed", None):
            raise ValueError(
                "ewc_strength adds to gradients, which DeepSpeed keeps to itself; take fsdp in place of "
                "deepspeed, or leave ewc_strength out"
            )
        if getattr(self, "fsdp", False) and self.use_peft:
            raise ValueError(
                "ewc_strength cannot hold sharded weights behind adapters; leave out ewc_strength, fsdp or "
                "use_peft"
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_trained(self) -> Self:
        if self.use_peft or getattr(self, "ensemble", None) == "adapters":
            return self
        for name, field in AdapterConfig.model_fields.items():
            if getattr(self, name) != field.default:
                raise ValueError(
                    f"{name} is set, but no adapter is trained; set use_peft=true, or leave {name} out"
                )
        return self

    @property
    def embedded(self) -> bool:
        """Whether the start model is the tiny one that is built now."""
        return self.model_name_or_path is None and self.scratch is None


class HeadConfig(BaseConfig):
    """The scalar head on a language model."""

    head: Literal["linear", "mlp"] = "linear"
    """One linear layer, as in transformers' classifiers, or two with a ReLU between them."""


class EnsembleConfig(HeadConfig):
    """Several reward models that disagree where they do not know."""

    num_members: int = Field(default=1, ge=1)
    """Number of reward models trained together."""
    ensemble: Literal["independent", "adapters", "heads"] = "independent"
    """Separate models, LoRA adapters on one frozen model, or heads on one model."""

    @model_validator(mode="after")
    def _has_members(self) -> Self:
        if self.num_members == 1 and self.ensemble != "independent":
            raise ValueError(f"ensemble is {self.ensemble} with num_members 1; set num_members to 2 or more")
        return self


TASK_REWARDS = {"story": ("choice",), "arithmetic": ("exact",)}
"""Embedded tasks of the online methods, and the default reward of each."""


class RewardSourceConfig(BaseConfig):
    """Reward functions, and the embedded prompts."""

    reward: Strings = ()
    """Reward functions: model folders or hub names, `pkg.mod:function`, URLs, or rules such as `number`."""
    task: Literal["story", "arithmetic"] = "story"
    """Prompts if no file is given: stories with a question, or small sums."""

    @field_validator("reward")
    @classmethod
    def _absolute_paths(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        from rlhf_infer import RewardFunctionFactory

        return tuple(map(RewardFunctionFactory.with_absolute_paths, lines))

    @classmethod
    def with_absolute_paths(cls, values: dict[str, Any]) -> dict[str, Any]:
        """See `BaseConfig.with_absolute_paths`."""
        found = super().with_absolute_paths(values)
        lines = found.get("reward", ())
        lines = [lines] if isinstance(lines, str) else lines
        if isinstance(lines, list | tuple) and lines and all(isinstance(line, str) for line in lines):
            found["reward"] = list(cls._absolute_paths(tuple(lines)))
        return found


class OnlineJobConfig(RewardSourceConfig, OnlineConfig, JobConfig):
    """Settings of every online method's job."""

    distributed: DistributedConfig | None = None
    """Sample on workers of a Ray cluster, or train in processes there; null does both in this process."""

    @model_validator(mode="after")
    def _can_be_trained(self) -> Self:
        if not self.reward:
            raise ValueError(
                "there is no reward; give one with --reward: a model, pkg.mod:function, a URL, or a rule "
                "such as number or choice"
            )
        weights = self.reward_weights
        if weights is not None and len(weights) != len(self.reward):
            raise ValueError(
                f"reward_weights has {len(weights)} numbers for {len(self.reward)} rewards; give one for each"
            )
        if self.vllm_sync_adapters and not (self.use_vllm and self.use_peft):
            raise ValueError("vllm_sync_adapters hands over adapters; it needs use_vllm and use_peft")
        if self.backend != "rlhf":
            raise ValueError("backend trl is for the offline methods; leave it out")
        self._check_distributed()
        return self

    def _check_distributed(self) -> None:
        workers = samplers(self)
        if workers is None:
            return
        if self.use_vllm and self.vllm_mode == "server":
            raise ValueError(
                "vllm_mode is server, and with rollout workers every worker has its own engine; set "
                "vllm_mode=colocate, or leave distributed out"
            )
        if self.speculation:  # a prompt may come to another worker in the next epoch
            raise ValueError("speculation does not go with rollout workers; leave out one of them")
        check_not_quantised(self)


_SECTIONS: dict[ModelKind, tuple[type[BaseConfig], ...]] = {
    "policy": (),
    "reward": (EnsembleConfig,),
    "judge": (HeadConfig,),
    "prm": (HeadConfig,),
}


def job_config(method: type[TrainerConfig], model: ModelKind) -> type[JobConfig]:
    """The flat config class of a job: the method's keys, those of its kind of model, and all of `JobConfig`.

    Returns:
        A subclass of all of them, whose instances a trainer takes as its method's config.
    """
    every = OnlineJobConfig if issubclass(method, OnlineConfig) else JobConfig
    bases: Any = (method, *_SECTIONS[model], every)
    name = method.__name__.removesuffix("Config") + "JobConfig"
    namespace = {"__doc__": f"Settings of a {method.__name__} job.", "__module__": __name__}
    return type(name, bases, namespace)
