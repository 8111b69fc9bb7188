"""Losses, advantages and trainers for RLHF."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_algos import advantages as advantages
    from rlhf_algos import losses as losses
    from rlhf_algos.checkpoints import CheckpointManager as CheckpointManager
    from rlhf_algos.checkpoints import load_optimizer_state as load_optimizer_state
    from rlhf_algos.checkpoints import load_rng_state as load_rng_state
    from rlhf_algos.checkpoints import load_weights as load_weights
    from rlhf_algos.checkpoints import save_optimizer_state as save_optimizer_state
    from rlhf_algos.checkpoints import save_rng_state as save_rng_state
    from rlhf_algos.config import TrainerConfig as TrainerConfig
    from rlhf_algos.logging import TrainingLogger as TrainingLogger
    from rlhf_algos.optim import create_optimizer as create_optimizer
    from rlhf_algos.optim import create_scheduler as create_scheduler
    from rlhf_algos.reward import PreferencePair as PreferencePair
    from rlhf_algos.reward import RewardConfig as RewardConfig
    from rlhf_algos.reward import RewardTrainer as RewardTrainer
    from rlhf_algos.scalar import LabelledSequence as LabelledSequence
    from rlhf_algos.scalar import ScalarConfig as ScalarConfig
    from rlhf_algos.scalar import ScalarTrainer as ScalarTrainer
    from rlhf_algos.sft import SFTConfig as SFTConfig
    from rlhf_algos.sft import SFTTrainer as SFTTrainer
    from rlhf_algos.trainer import BaseTrainer as BaseTrainer
    from rlhf_algos.trainer import LossOutput as LossOutput

_MODULES = {
    "checkpoints": (
        *("CheckpointManager", "load_optimizer_state", "load_rng_state"),
        *("load_weights", "save_optimizer_state", "save_rng_state"),
    ),
    "config": ("TrainerConfig",),
    "logging": ("TrainingLogger",),
    "optim": ("create_optimizer", "create_scheduler"),
    "reward": ("PreferencePair", "RewardConfig", "RewardTrainer"),
    "scalar": ("LabelledSequence", "ScalarConfig", "ScalarTrainer"),
    "sft": ("SFTConfig", "SFTTrainer"),
    "trainer": ("BaseTrainer", "LossOutput"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted([*_MODULE_OF, "advantages", "losses"])


def __getattr__(name: str) -> Any:
    if name in ("advantages", "losses"):
        return importlib.import_module(f"rlhf_algos.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_algos' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_algos.{_MODULE_OF[name]}"), name)
