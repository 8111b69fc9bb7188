"""Settings of vLLM, in process or as a server, and the fields of its requests."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field
from transformers import AutoConfig, GenerationConfig

from rlhf_data import BaseConfig, UserError, invalid_value
from rlhf_infer.engines.constraints import Constraint, schema_as_grammar
from rlhf_infer.engines.protocol import Rollout, SamplingParams, end_tokens, ends_of

INSTALL = 'vLLM is not installed; run `pip install "rlhf-infer[vllm]"`, or use the transformers engine'
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM 0.32 reserves room for."""
TEMPERATURES = (0.01, 2.0)
"""Range that vLLM 0.32 accepts besides 0; it raises lower values to 0.01 and refuses higher ones."""

_SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Sampling parameters that vLLM calls as we do."""


class VLLMSettings(BaseConfig):
    """Size and shape of a vLLM engine."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and cache; `auto` is the folder's, or half precision where that is float32."""
    gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Share of the device's memory for weights and cache; on CPUs of the machine's memory."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Size of the cache of keys and values in GiB; null for what `gpu_memory_utilization` leaves."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and completion together, in tokens; null for the model's context."""
    max_lora_rank: int | None = Field(default=None, ge=1, le=LORA_RANKS[-1])
    """Highest rank of the LoRA adapters that weights are synced as; null syncs all weights."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that the model is spread over."""
    enforce_eager: bool = False
    """Start without compiling and CUDA graphs: sooner, but slower generation."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of vLLM's own random state, which no request with a seed uses."""
    speculative_config: dict[str, bool | int | float | str] | None = None
    """How vLLM speculates, under its names, such as `{"method": "ngram", "num_speculative_tokens": 4}`."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further engine arguments under vLLM's names, such as `max_num_seqs`."""

    def engine_arguments(self) -> dict[str, Any]:
        """The settings under the names of vLLM's engine arguments."""
        names = (
            *("dtype", "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager", "seed"),
            *("max_model_len", "speculative_config"),
        )
        arguments = {name: value for name in names if (value := getattr(self, name)) is not None}
        arguments["generation_config"] = "vllm"
        if self.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(self.kv_cache_gib * (1 << 30))
        if self.max_lora_rank is not None:
            rank = next(rank for rank in LORA_RANKS if rank >= self.max_lora_rank)
            arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        return arguments | self.options


def require_vllm() -> None:
    """Raise a UserError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(INSTALL, code="missing_package")


def set_environment() -> None:
    """No telemetry, this process's other threads left alone, few messages; what the user has set stays."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def end_token_ids(model: str | None, tokenizer: Any) -> list[int]:
    """End-of-sequence tokens of a tokenizer and of the model's generation config.

    `model` is a folder or hub name; None asks the tokenizer alone, for its `eos_token_id`.
    """
    ends: Any = None
    if model is not None:
        try:
            ends = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:  # the folder has none
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            ends = getattr(config.get_text_config(), "eos_token_id", None)
    return end_tokens(ends, tokenizer)


def check_requests(prompts: Sequence[Sequence[int]], params: SamplingParams, limit: int) -> None:
    """Refuse what vLLM cannot do, or would do differently."""
    if params.logits_processors:
        raise invalid_value(
            "vLLM takes no logits processors per request; use the transformers engine for them",
            "logits_processors",
        )
    if params.coupled:
        raise invalid_value(
            "vLLM draws tokens its own way; use the transformers engine for coupled", "coupled"
        )
    if params.raw_logprobs:
        raise UserError(
            "this engine's log-probs are those at the sampling temperature; use the transformers engine for "
            "raw_logprobs"
        )
    low, high = TEMPERATURES
    if params.temperature and not low <= params.temperature <= high:
        raise invalid_value(
            f"vLLM samples at temperatures from {low} to {high}, or greedily at 0, got {params.temperature}; "
            "choose one of them or use the transformers engine",
            "temperature",
        )
    check_lengths(prompts, params.max_new_tokens, limit)


def check_lengths(prompts: Sequence[Sequence[int]], max_new_tokens: int, limit: int) -> None:
    """Refuse prompts that are empty, or longer than `limit` tokens with a completion."""
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {i} has no tokens; expected at least one", code="empty_prompt")
        if len(prompt) + max_new_tokens > limit:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, "
                f"together more than vLLM's max_model_len of {limit}; "
                "shorten the prompt or lower max_new_tokens",
                code="context_too_short",
            )


def request_fields(params: SamplingParams, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Fields that vLLM's `SamplingParams` and its completions endpoint share, for all samples of a call."""
    fields: dict[str, Any] = {name: getattr(params, name) for name in _SAME_NAMES}
    if params.logit_bias:
        fields["logit_bias"] = dict(params.logit_bias)
    if params.constraint is not None:
        fields["structured_outputs"] = _structured_outputs(params.constraint)
    return fields | {
        "max_tokens": params.max_new_tokens,
        "min_tokens": params.min_new_tokens,
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "ignore_eos": True,  # the ids say it all, whatever vLLM's own tokenizer takes for the end
        "stop_token_ids": ends_of(params, eos_token_ids),
        "logprobs": params.top_logprobs,
    }


def _structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """A constraint in vLLM's words; schemas as our engine's grammar.

    VLLM bounds no blanks, and allows control characters in strings with a length.
    """
    if (grammar := schema_as_grammar(constraint)) is not None:
        return {"grammar": grammar}
    if constraint.kind == "choice":
        return {"choice": json.loads(constraint.value)}
    return {constraint.kind: constraint.value}


def engine_request(fields: dict[str, Any]) -> Any:
    """VLLM's `SamplingParams` of `request_fields` and others, for an engine in this process."""
    from vllm import SamplingParams as Request  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports]

    fields = dict(fields)
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    return Request(**fields)


def sample_seed(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Seed in [0, 2^63) of one sample, from nothing but (seed, prompt, sample)."""
    key = repr((seed, tuple(int(token) for token in prompt), sample)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def sample_seeds(
    params: SamplingParams, prompts: Sequence[tuple[int, ...]], n: int, first: int = 0
) -> list[dict[str, int]]:
    """Fields that the P·n requests add to `request_fields`, prompt by prompt; none when greedy."""
    if params.temperature == 0:
        return [{} for _ in prompts]
    samples = range(first, first + n)
    return [{"seed": sample_seed(params.seed, prompt, k)} for prompt in prompts for k in samples]


def likeliest(entry: Any, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens in vLLM's log-probs of one position, with their log-probs, likeliest first."""
    pairs = ((token, each.logprob) for token, each in entry.items())
    return sorted(pairs, key=lambda pair: -pair[1])[:count]


def rollout_from(prompt: Sequence[int], output: Any, top_logprobs: int = 0) -> Rollout:
    """A rollout of vLLM's output for one sample (`CompletionOutput`), without log-probs if it has none.

    Raises:
        RuntimeError: vLLM ended it for another reason than an end or its length.
    """
    tokens = list(output.token_ids)
    entries = output.logprobs or []
    logps = [entry[token].logprob for token, entry in zip(tokens, entries, strict=bool(entries))]
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion for the reason {output.finish_reason!r}")
    tops = None
    if top_logprobs:
        tops = [likeliest(entry, top_logprobs) for entry in entries]
    return Rollout(prompt, tokens, logps, output.finish_reason, tops)


def returned_logps_are_exact(mode: str, params: SamplingParams) -> bool:
    """Whether vLLM's own log-probs are those of the whole vocabulary at the sampling temperature.

    `mode` is vLLM's `logprobs_mode`.
    """
    if mode == "raw_logprobs":
        return params.temperature in (0, 1)
    changed = params.repetition_penalty != 1 or params.min_new_tokens > 0 or bool(params.logit_bias)
    changed = changed or bool(params.presence_penalty or params.frequency_penalty or params.constraint)
    cut = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
    return mode == "processed_logprobs" and not (changed or cut)
