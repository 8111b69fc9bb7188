"""Generation engines and judges for RLHF."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_infer.engine import Rollout as Rollout
    from rlhf_infer.engine import SamplingParams as SamplingParams
    from rlhf_infer.engine import TransformersEngine as TransformersEngine
    from rlhf_infer.judges import Judge as Judge
    from rlhf_infer.judges import PromptedJudge as PromptedJudge
    from rlhf_infer.judges import RuleJudge as RuleJudge
    from rlhf_infer.judges import verdict_rule as verdict_rule

_MODULES = {
    "engine": ("Rollout", "SamplingParams", "TransformersEngine"),
    "judges": ("Judge", "PromptedJudge", "RuleJudge", "verdict_rule"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
