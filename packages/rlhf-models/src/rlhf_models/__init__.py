"""Policy, reward, judge and value models, LoRA adapters, packed attention and log-probs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_models.adapters import (
        AdapterSet as AdapterSet,
        LoraSettings as LoraSettings,
        add_adapters as add_adapters,
        lora_settings_of as lora_settings_of,
    )
    from rlhf_models.attention import (
        AttentionOptions as AttentionOptions,
        AttentionPlan as AttentionPlan,
        TreeAttention as TreeAttention,
        prepare_for_packing as prepare_for_packing,
    )
    from rlhf_models.device_manager import (
        DeviceManager as DeviceManager,
        Placement as Placement,
    )
    from rlhf_models.heads import (
        JudgeModel as JudgeModel,
        RewardModel as RewardModel,
        ScalarModel as ScalarModel,
        ValueModel as ValueModel,
    )
    from rlhf_models.loading import (
        check_prompt_fits as check_prompt_fits,
        check_tokenizer_fits as check_tokenizer_fits,
        context_length as context_length,
        encode_completion as encode_completion,
        encode_prompt as encode_prompt,
        load_causal_lm as load_causal_lm,
        load_tokenizer as load_tokenizer,
    )
    from rlhf_models.logps import (
        TokenLogps as TokenLogps,
        hidden_states as hidden_states,
        lm_logits as lm_logits,
        stream_forward as stream_forward,
        token_logps as token_logps,
    )
    from rlhf_models.policy import (
        PolicyModel as PolicyModel,
    )
    from rlhf_models.tiny import (
        build_tiny_llama as build_tiny_llama,
        tiny_model as tiny_model,
        train_byte_tokenizer as train_byte_tokenizer,
    )

_MODULES = {
    "adapters": (
        "AdapterSet",
        "LoraSettings",
        "add_adapters",
        "lora_settings_of",
    ),
    "attention": (
        "AttentionOptions",
        "AttentionPlan",
        "TreeAttention",
        "prepare_for_packing",
    ),
    "device_manager": (
        "DeviceManager",
        "Placement",
    ),
    "heads": (
        "JudgeModel",
        "RewardModel",
        "ScalarModel",
        "ValueModel",
    ),
    "loading": (
        "check_prompt_fits",
        "check_tokenizer_fits",
        "context_length",
        "encode_completion",
        "encode_prompt",
        "load_causal_lm",
        "load_tokenizer",
    ),
    "logps": (
        "TokenLogps",
        "hidden_states",
        "lm_logits",
        "stream_forward",
        "token_logps",
    ),
    "policy": ("PolicyModel",),
    "tiny": (
        "build_tiny_llama",
        "tiny_model",
        "train_byte_tokenizer",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_models.{_MODULE_OF[name]}"), name)
