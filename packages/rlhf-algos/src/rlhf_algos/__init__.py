"""Losses, advantages and trainers for RLHF."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "checkpoints.manager": (
        *("CheckpointManager", "load_optimizer_state", "load_rng_state"),
        *("load_weights", "save_optimizer_state", "save_rng_state"),
    ),
    "configs.trainer": ("TrainerConfig",),
    "tracking.debug": ("ActivationHistograms", "GradientFlow", "Sampler"),
    "offline.dpo": ("DPOTrainer",),
    "online.grpo": ("GRPOTrainer",),
    "offline.kto": ("KTOTrainer",),
    "jobs.training_job": ("TrainingJob",),
    "tracking.metrics_log": ("TrainingLogger", "setup_logging"),
    "configs.offline": (
        *("DPOConfig", "KTOConfig", "PRMConfig", "ReferenceConfig", "RewardConfig", "SFTConfig"),
        *("RewardModelConfig", "SimPOConfig"),
    ),
    "jobs.methods": ("METHODS", "Method"),
    "jobs.model_card": ("write_model_card",),
    "online.base": ("OnlineTrainer",),
    "configs.online": ("GRPOConfig", "OnlineConfig", "PPOConfig"),
    "engine.optimizer": ("create_optimizer", "create_scheduler"),
    "jobs.rlhf": ("RLHFConfig", "RLHFOrchestrator", "RLHFTrainer", "TrainingStage"),
    "jobs.dry_run": ("plan_training",),
    "online.ppo": ("PPOTrainer",),
    "online.preflight": ("Finding", "ReferenceRewards"),
    "offline.prm": ("PRMTrainer", "ProcessRewardModelTrainer"),
    "reference.trainer": ("ReferenceTrainer",),
    "jobs.results": ("finish_run",),
    "offline.reward": ("PreferencePair", "RewardModelTrainer", "RewardTrainer"),
    "offline.scalar_head": ("LabelledSequence", "ScalarConfig", "ScalarTrainer"),
    "offline.sft": ("SFTTrainer",),
    "engine.signals": ("GracefulStop",),
    "offline.simpo": ("SimPOTrainer",),
    "tracking.early_stopping": ("EarlyStopping",),
    "tracking.trackers": ("create_trackers",),
    "engine.base_trainer": ("BaseTrainer", "LossOutput"),
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
