"""Policy, reward, judge and value models, LoRA adapters, packed attention and log-probs."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_models.adapters import AdapterSet as AdapterSet
    from rlhf_models.adapters import LoraSettings as LoraSettings
    from rlhf_models.adapters import add_adapters as add_adapters
    from rlhf_models.attention import TreeAttention as TreeAttention
    from rlhf_models.attention import prepare_for_packing as prepare_for_packing
    from rlhf_models.device_manager import DeviceManager as DeviceManager
    from rlhf_models.device_manager import Placement as Placement
    from rlhf_models.heads import JudgeModel as JudgeModel
    from rlhf_models.heads import RewardModel as RewardModel
    from rlhf_models.heads import ScalarModel as ScalarModel
    from rlhf_models.heads import ValueModel as ValueModel
    from rlhf_models.loading import check_prompt_fits as check_prompt_fits
    from rlhf_models.loading import context_length as context_length
    from rlhf_models.loading import encode_completion as encode_completion
    from rlhf_models.loading import encode_prompt as encode_prompt
    from rlhf_models.loading import load_causal_lm as load_causal_lm
    from rlhf_models.loading import load_tokenizer as load_tokenizer
    from rlhf_models.logps import TokenLogps as TokenLogps
    from rlhf_models.logps import hidden_states as hidden_states
    from rlhf_models.logps import token_logps as token_logps
    from rlhf_models.policy import PolicyModel as PolicyModel
    from rlhf_models.tiny import build_tiny_llama as build_tiny_llama
    from rlhf_models.tiny import tiny_model as tiny_model
    from rlhf_models.tiny import train_byte_tokenizer as train_byte_tokenizer

_MODULE_OF = {
    **dict.fromkeys(("AdapterSet", "LoraSettings", "add_adapters"), "adapters"),
    **dict.fromkeys(("TreeAttention", "prepare_for_packing"), "attention"),
    **dict.fromkeys(("DeviceManager", "Placement"), "device_manager"),
    **dict.fromkeys(("JudgeModel", "RewardModel", "ScalarModel", "ValueModel"), "heads"),
    **dict.fromkeys(("check_prompt_fits", "context_length", "encode_completion", "encode_prompt"), "loading"),
    **dict.fromkeys(("load_causal_lm", "load_tokenizer"), "loading"),
    **dict.fromkeys(("TokenLogps", "hidden_states", "token_logps"), "logps"),
    **dict.fromkeys(("PolicyModel",), "policy"),
    **dict.fromkeys(("build_tiny_llama", "tiny_model", "train_byte_tokenizer"), "tiny"),
}

__all__ = sorted(_MODULE_OF)

# At every import bitsandbytes warns of a missing optional kernel, which serves a path not taken here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_models.{_MODULE_OF[name]}"), name)
