"""Settings for models of 7 and 70 billion parameters on GPUs of 80 GB; `configs/presets/` has them, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ALL: Mapping[str, Any] = {"gradient_checkpointing": True, "max_tokens_per_batch": 8192}
_ADAPTERS: Mapping[str, Any] = {"dtype": "bfloat16", "use_peft": True, "lora_r": 16}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "7b_single_gpu": {**_ALL, **_ADAPTERS, "learning_rate": 1e-5, "per_device_train_batch_size": 16},
    "7b_node": {**_ALL, "fsdp": True, "learning_rate": 1e-6, "per_device_train_batch_size": 8},
    "70b_node": {
        **_ALL,
        **_ADAPTERS,
        "fsdp": True,
        "learning_rate": 5e-6,
        "per_device_train_batch_size": 8,
    },
    "70b_multi_node": {**_ALL, "fsdp": True, "learning_rate": 5e-7, "per_device_train_batch_size": 8},
}
"""By the name of their file: adapters on one GPU of 7B, or sharded of 70B; all weights, sharded, on more."""
SMALLEST: Mapping[str, tuple[tuple[int, str], ...]] = {
    "7b": ((4, "7b_node"), (1, "7b_single_gpu")),
    "70b": ((64, "70b_multi_node"), (4, "70b_node")),
}
"""From how many GPUs on a preset is taken."""
