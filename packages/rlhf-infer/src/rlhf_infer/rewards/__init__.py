"""Reward functions: rules, verifiable answers, models, remote scorers, constitutions, and all together."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_infer.rewards.combine import RewardFunctions as RewardFunctions
    from rlhf_infer.rewards.combine import RewardScores as RewardScores
    from rlhf_infer.rewards.conventions import RewardFunction as RewardFunction
    from rlhf_infer.rewards.conventions import TrainerState as TrainerState
    from rlhf_infer.rewards.factory import RewardFunctionFactory as RewardFunctionFactory
    from rlhf_infer.rewards.judged.constitutional import PRINCIPLE_TEMPLATE as PRINCIPLE_TEMPLATE
    from rlhf_infer.rewards.judged.constitutional import (
        ConstitutionalRewardWrapper as ConstitutionalRewardWrapper,
    )
    from rlhf_infer.rewards.judged.constitutional import Principle as Principle
    from rlhf_infer.rewards.judged.principle_files import load_principles as load_principles
    from rlhf_infer.rewards.normalise import RewardNormaliser as RewardNormaliser
    from rlhf_infer.rewards.normalise import normalised as normalised

_MODULES = {
    "conventions": ("RewardFunction", "TrainerState"),
    "judged.constitutional": ("PRINCIPLE_TEMPLATE", "ConstitutionalRewardWrapper", "Principle"),
    "factory": ("RewardFunctionFactory",),
    "judged.principle_files": ("load_principles",),
    "combine": ("RewardFunctions", "RewardScores"),
    "normalise": ("RewardNormaliser", "normalised"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
