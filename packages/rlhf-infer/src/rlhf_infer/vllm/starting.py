"""Checks before vLLM starts, and the reason why it did not, in one sentence."""

from __future__ import annotations

import re

from rlhf_data import UserError
from rlhf_infer.vllm.settings import VLLMSettings
from rlhf_infer.vllm.worker import SmallHeadsError
from rlhf_models import generation_length, load_config

_REASON = 300
"""Characters of vLLM's reason that a message shows."""
_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")
_INVALID = re.compile(r"validation errors? for \w+\n(\w+)\n  (?!Value error, )(.+?) \[type=")
_TOO_LONG = re.compile(r"max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=(\d+)")
_MEMORY = re.compile(r"\((\S+/\S+ GiB)\) on startup is less than desired .*?\((\S+), (\S+ GiB)\)")


def known_length(model: str, settings: VLLMSettings) -> int | None:
    """The longest prompt and completion together, as far as it is certain without vLLM; else None."""
    if {"max_model_len", "hf_overrides"} & settings.options.keys():
        return None
    if settings.max_model_len is not None:
        return settings.max_model_len
    config = load_config(model)
    # Of some kinds of rotary positions vLLM multiplies the context by a factor.
    rotary = getattr(config.get_text_config(), "rope_parameters", None)
    return None if "factor" in repr(rotary) else generation_length(config)


def not_started(model: str, error: Exception) -> UserError:
    """The error for a failed start of vLLM, as a sentence that names our settings."""
    code = "head_too_small" if isinstance(error, SmallHeadsError) else "engine_not_started"
    return UserError(f"vLLM cannot start with {model}: {_reason(str(error))}", code=code)


def _reason(text: str) -> str:
    if found := _UNKNOWN.search(text):
        return f"it has no engine argument {found[1]}; correct the name in its options (vllm_options)"
    if found := _TOO_LONG.search(text):
        return f"max_model_len is {found[1]}, and the model's context {found[2]} tokens; lower it"
    if found := _MEMORY.search(text):
        return (
            f"gpu_memory_utilization {found[2]} asks for {found[3]} of memory, {found[1]} are free; lower "
            "it, or free memory"
        )
    if found := _INVALID.search(text):
        return f"{found[1]}: {found[2]}"[:_REASON]
    _, mark, invalid = text.partition("Value error, ")  # pydantic's, on further lines
    return (invalid if mark else text).strip().partition("\n")[0].partition(" [type=")[0][:_REASON]
