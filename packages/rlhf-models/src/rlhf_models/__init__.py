"""Policy, reward, judge and value models, LoRA adapters, packed attention and log-probs."""

from __future__ import annotations

import importlib
import logging
from typing import Any

_MODULES = {
    "adapters.lora": ("AdapterSet", "LoraSettings", "add_adapters", "apply_lora"),
    "attention.packed": ("OptimizedAttention", "TreeAttention", "prepare_for_packing"),
    "kernels.compile": ("compile_model",),
    "device_manager": ("DeviceManager", "Placement"),
    "language_model.dropout": ("disable_dropout", "evaluating"),
    "heads.ensemble": ("RewardEnsemble", "aggregate_scores"),
    "language_model.head": ("TokenLogps",),
    "language_model.encoding": ("encode_completion", "encode_prompt"),
    "loading.pretrained": (
        *("check_prompt_fits", "context_length"),
        *("load_causal_lm", "load_tokenizer"),
    ),
    "language_model.logps": ("hidden_states", "score_hidden", "token_logps"),
    "policy": ("PolicyModel",),
    "heads.process_reward": ("ProcessRewardModel", "aggregate_step_scores"),
    "heads.reward": ("JudgeModel", "RewardModel", "ScalarModel"),
    "loading.scratch": ("ModelConfig", "build_model", "build_tokenizer", "load_model_config"),
    "loading.tiny": ("build_tiny_llama", "tiny_model", "train_byte_tokenizer"),
    "heads.value": ("ValueHead", "ValueModel"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)

# At every import bitsandbytes warns of a missing optional kernel, which serves a path not taken here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_models.{_MODULE_OF[name]}"), name)
