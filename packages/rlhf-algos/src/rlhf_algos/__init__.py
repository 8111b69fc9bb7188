"""Losses, advantages and trainers for RLHF."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "checkpoints": (
        *("CheckpointManager", "load_optimizer_state", "load_rng_state"),
        *("load_weights", "save_optimizer_state", "save_rng_state"),
    ),
    "config": ("TrainerConfig",),
    "debug": ("ActivationHistograms", "GradientFlow", "Sampler"),
    "dpo": ("DPOTrainer",),
    "grpo": ("GRPOTrainer",),
    "kto": ("KTOTrainer",),
    "job": ("TrainingJob",),
    "logging": ("TrainingLogger", "setup_logging"),
    "method_configs": (
        *("DPOConfig", "KTOConfig", "PRMConfig", "ReferenceConfig", "RewardConfig", "SFTConfig"),
        *("RewardModelConfig", "SimPOConfig"),
    ),
    "methods": ("METHODS", "Method"),
    "model_card": ("write_model_card",),
    "online": ("OnlineTrainer",),
    "online_configs": ("GRPOConfig", "OnlineConfig", "PPOConfig"),
    "optim": ("create_optimizer", "create_scheduler"),
    "orchestrator": ("RLHFConfig", "RLHFOrchestrator", "RLHFTrainer", "TrainingStage"),
    "planning": ("plan_training",),
    "ppo": ("PPOTrainer",),
    "preflight": ("Finding", "ReferenceRewards"),
    "prm": ("PRMTrainer", "ProcessRewardModelTrainer"),
    "reference": ("ReferenceTrainer",),
    "results": ("finish_run",),
    "reward": ("PreferencePair", "RewardModelTrainer", "RewardTrainer"),
    "scalar": ("LabelledSequence", "ScalarConfig", "ScalarTrainer"),
    "sft": ("SFTTrainer",),
    "signals": ("GracefulStop",),
    "simpo": ("SimPOTrainer",),
    "stopping": ("EarlyStopping",),
    "trackers": ("create_trackers",),
    "trainer": ("BaseTrainer", "LossOutput"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "METHODS",
    *sorted((_MODULE_OF.keys() - {"METHODS"}) | {"advantages", "losses"}),
]


def __getattr__(name: str) -> Any:
    if name in ("advantages", "losses"):
        return importlib.import_module(f"rlhf_algos.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_algos' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_algos.{_MODULE_OF[name]}"), name)
