"""The settings of a server, and of a run over a file."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhf_data import BaseConfig, model_folder
from rlhf_infer import ConfidenceBasedStopping, ScorePopulation, SearchSettings, StepLabelSettings
from rlhf_models import CompressionSettings

ModelName = Annotated[str, AfterValidator(lambda name: name and model_folder(name))]
"""Folder or hub name of a model; a run's folder stands for its model."""


class PopulationSettings(BaseConfig):
    """How scores of other prompts vary, see `rlhf_infer.ScorePopulation`."""

    mean: float
    """Mean over the prompts."""
    within: float = Field(gt=0)
    """Typical variance of a prompt's scores."""
    between: float = Field(ge=0)
    """Variance of the prompts' means."""
    prior_samples: int = Field(ge=1)
    """Samples that `within` counts for; few where prompts differ much."""


class StoppingSettings(BaseConfig):
    """When drawing ends early, see `rlhf_infer.ConfidenceBasedStopping`."""

    min_samples: int = Field(default=4, ge=1)
    """Candidates drawn first, unless fewer are requested."""
    batch: int = Field(default=4, ge=1)
    """Candidates drawn at a time afterwards."""
    probability: float = Field(default=0.1, ge=0, le=1)
    """Stop below this chance of a better one; 0 draws them all."""
    tolerance: float = Field(default=0.0, ge=0)
    """A gain in score too small to draw more candidates for."""
    highest: float | None = None
    """A score that cannot be beaten, such as 1 for a checked answer; null for none."""
    population: PopulationSettings | None = None
    """How scores of other prompts vary; null judges each prompt by itself."""

    def rule(self, most: int) -> ConfidenceBasedStopping:
        """The rule for a prompt, given the most candidates that are drawn of it."""
        population = None if self.population is None else ScorePopulation(**self.population.to_dict())
        return ConfidenceBasedStopping(
            min_samples=min(self.min_samples, most),
            max_samples=most,
            batch=self.batch,
            probability=self.probability,
            tolerance=self.tolerance,
            highest=math.inf if self.highest is None else self.highest,
            population=population,
        )


class ModelSettings(BaseConfig):
    """Models to load."""

    model: ModelName | None = None
    """Folder or hub name of the policy; null for the embedded demonstration."""
    reward: tuple[str, ...] = ()
    """Rewards that score candidates: specs of `rlhf-train --reward`, process reward models included."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward; null for 1 each."""
    n: int = Field(default=8, ge=1)
    """Candidates drawn for a request that does not say how many."""
    answer: Literal["text", "marked", "number"] = "text"
    """Unit of majority votes: the whole text, the marked answer, or the number."""
    stopping: StoppingSettings = Field(default_factory=StoppingSettings)
    """When drawing ends where `stop_early` asks for that."""
    backend: Literal["auto", "transformers", "vllm"] = "auto"
    """Generation engine; `auto` is vLLM if it is installed and there is a GPU, otherwise transformers."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; `auto` is as stored, with vLLM half precision where that is float32."""
    draft_model: ModelName | None = None
    """Folder or hub name of a small model of the same tokenizer that guesses tokens; null for none."""
    draft: Literal["ngram", "layers"] | None = None
    """Guess the next tokens without another model: `ngram` repeats what followed the last ones before,
    `layers` uses the model's first layers."""
    draft_layers: int | None = Field(default=None, ge=1)
    """Number of first layers that `layers` uses; null for a quarter of the model's."""
    draft_tokens: int | None = Field(default=None, ge=1)
    """Tokens guessed at a time; null for 4 of a draft model or of layers, and up to 16 of `ngram`."""
    draft_alternatives: int | None = Field(default=None, ge=0)
    """transformers: of a draft model or of layers, places that two tokens are guessed for; null for 2."""
    device: str | None = None
    """Device of the models; null for the first GPU, or the CPU."""
    chat_template: str | None = None
    """File with a chat template, for a tokenizer that has none."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of the demonstration's models; those of 0 come with the package."""
    max_batch_tokens: int = Field(default=1 << 17, ge=1)
    """transformers: prompt and completion tokens whose keys and values are held at a time."""
    prefix_cache_tokens: int = Field(default=0, ge=0)
    """transformers: prompt tokens whose keys and values are kept for later prompts that begin alike."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """vLLM: share of the device's memory for weights and cache; reward models need the rest."""
    max_model_len: int | None = Field(default=None, ge=2)
    """vLLM: longest prompt and completion; null for the model's context."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """vLLM: devices that the model is spread over."""
    vllm_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """vLLM: further engine arguments under vLLM's names."""

    @model_validator(mode="after")
    def _one_draft(self) -> Self:
        if self.draft_model and self.draft:
            raise ValueError("draft_model and draft both guess tokens; give one of them")
        if self.draft_tokens and not (self.draft_model or self.draft):
            raise ValueError("draft_tokens is given, and nothing that guesses; give draft_model or draft too")
        if self.draft_alternatives is not None and not (self.draft_model or self.draft == "layers"):
            raise ValueError(
                "draft_alternatives has no effect without a draft model or layers; give draft_model or set "
                "draft to layers"
            )
        if self.draft_layers and self.draft != "layers":
            raise ValueError("draft_layers has no effect unless draft is layers; set draft to layers")
        return self


class ServeSettings(ModelSettings):
    """The served model and its limits."""

    prefix_cache_tokens: int = Field(default=8192, ge=0)
    """transformers: prompt tokens whose keys and values are kept for later prompts that begin alike."""
    chunk_tokens: int | None = Field(default=None, ge=32)
    """transformers: prompt tokens computed between two tokens of others; null: 256 on CPUs, 2048 on GPUs."""
    served_model_name: str | None = None
    """Model name for clients; null for the name of the folder, or of the run."""
    host: str = "127.0.0.1"
    """Address that is listened on; only this machine reaches the default one."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port; 0 takes a free one."""
    max_n: int = Field(default=64, ge=1)
    """Most candidates that a request may ask for."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum completion length in tokens; null allows the rest of the context."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt in tokens; null for what the model's context leaves."""
    max_prompts: int = Field(default=64, ge=1)
    """Most prompts in one request of `/v1/completions`."""
    max_scored: int = Field(default=256, ge=1)
    """Most texts in one request for scores."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the server, such as `https://example.org`; `*` for all."""
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    """Largest body of a request."""
    max_running: int = Field(default=64, ge=1)
    """Requests that are worked on at a time."""
    max_waiting: int = Field(default=256, ge=0)
    """Requests that wait for their turn; further ones are answered with 429."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a request is given up."""
    drain_timeout_s: float = Field(default=60.0, ge=0)
    """Seconds that requests have to finish after SIGTERM."""
    api_keys_file: str | None = None
    """File with one API key a line, `name key` or `key`."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests that a key may make in a minute; null for any number."""
    max_concurrent_per_key: int | None = Field(default=None, ge=1)
    """Requests of a key that are open at a time; null for any number."""
    log_prompts: bool = False
    """Whether prompts are written into the log."""
    feedback: str | None = None
    """File to which ratings of answers are appended, as rows for `rlhf-train kto`; null takes no ratings."""


class RowsSettings(BaseConfig):
    """A file of rows: where they come from and where they go."""

    input_path: str
    """Rows: JSON lines, JSON, CSV, Parquet or Arrow."""
    output_path: str
    """JSON lines, in the order of the input."""
    overwrite: bool = False
    """Start over where the output exists."""
    batch_size: int = Field(default=16, ge=1)
    """Rows at a time."""


class FileSettings(ModelSettings, RowsSettings):
    """Completions of a file of prompts: where they come from, where they go, how they are drawn."""

    max_tokens: int = Field(default=256, ge=1)
    """Longest completion in tokens."""
    temperature: float = Field(default=1.0, ge=0)
    """0 takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """The likeliest tokens that together have at least this probability."""
    top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens to sample from; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Tokens at least this share as likely as the likeliest one."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides positive and multiplies negative logits of tokens that were there; 1 leaves them."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    sampling_seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of the samples."""


class BatchSettings(FileSettings):
    """The best completion of every prompt of a file."""

    keep: int | None = Field(default=None, ge=1)
    """The best N candidates are written too; null for none."""
    selection: Literal["best", "majority", "weighted"] = "best"
    """The `best` by score, or votes of the candidates' answers, plain (`majority`) or `weighted` by score."""
    budget: int | None = Field(default=None, ge=1)
    """Samples per prompt on average, given where they pay, at most `n`; null for `n` each."""
    stop_early: bool = False
    """Stop sampling a prompt whose best will hardly be beaten; `n` is then the most."""
    search: SearchSettings | None = None
    """Search step by step instead of sampling whole completions; null for best-of-N."""
    search_tree: str | None = None
    """JSON lines with everything that the search has drawn; null for none."""


class RefineSettings(FileSettings):
    """Drafts, critiques and rewrites for a file of prompts."""

    critic: ModelName | None = None
    """Folder or hub name of the model that criticises; null for the policy itself."""
    critic_max_tokens: int | None = Field(default=None, ge=1)
    """Longest critique in tokens; null for `max_tokens`."""
    principles: str | tuple[str, ...] = ()
    """Principles, or a file of them; the critiques of a round are about one of them, taken in turn."""
    rounds: int = Field(default=3, ge=0)
    """Rewrites of a prompt at most."""
    until: Literal["score", "no_change", "verdict", "never"] = "never"
    """The rule that ends a prompt's rounds earlier, see `rlhf_infer.RefinerRules`."""
    keep: Literal["best", "last"] = "best"
    """The draft that becomes the completion; `best` needs a reward."""
    min_gain: float = Field(default=0.0, ge=0)
    """A draft is better than an earlier one only if its score is higher by more than this."""
    verdict: str | None = None
    """Regular expression for critiques that find nothing wrong; null for the built-in one."""
    templates: dict[Literal["critique", "refine", "chat_critique", "chat_refine"], str] = Field(
        default_factory=dict
    )
    """Other wordings than those of `rlhf_infer.RefinerTemplates`."""

    @model_validator(mode="after")
    def _only_what_counts(self) -> Self:
        _check_unused(self, "goes with several candidates, and refinement has one; leave it out")
        return self


class LabelSettings(FileSettings):
    """Step labels of a file of prompts."""

    labels: StepLabelSettings = Field(default_factory=StepLabelSettings)
    """How many solutions and completions are drawn, and what makes a label."""

    @model_validator(mode="after")
    def _only_what_counts(self) -> Self:
        _check_unused(self, "is of best-of-N; give --solutions and --completions")
        return self


def _check_unused(settings: FileSettings, why: str) -> None:
    """Refuse what only the choice among several candidates reads."""
    for name in ("n", "answer", "stopping"):
        if name in settings.model_fields_set:
            raise ValueError(f"{name} {why}")


class CompressSettings(RowsSettings, CompressionSettings):
    """Shorter texts of a file of rows."""

    model: ModelName
    """Folder or hub name of the language model that scores; it need not be the one that reads."""
    text_key: str = "prompt"
    """Column with the text."""
    question_key: str | None = None
    """Column with what is asked of the text; null for none, which only `surprisal` allows."""
    protect: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that are kept wherever they occur."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights."""
    device: str | None = None
    """Device of the model; null for the first GPU, or the CPU."""


def load_options(settings: ModelSettings | CompressSettings) -> dict[str, Any]:
    """The dtype and the device with which the models of the settings are loaded."""
    import torch

    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return {"dtype": settings.dtype, "device": device}
