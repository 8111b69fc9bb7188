"""Generation engines, reward functions and judges for RLHF."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "adaptive": ("AdaptiveComputeAllocator",),
    "api_judge": ("APIJudge", "APIUsage"),
    "best_of_n": ("BestOfNSampler",),
    "candidates": ("Candidate", "SamplingCost", "Selected", "Selection", "select"),
    "continuous": ("ContinuousBatcher",),
    "engine": ("TransformersEngine",),
    "ensemble_policy": ("EnsemblePolicy",),
    "http_client": ("ScorerUnavailable",),
    "judge_settings": ("APISettings",),
    "judges": ("Judge", "PromptedJudge", "RuleJudge", "verdict_rule"),
    "pairwise_judge": ("Comparison", "PairwiseJudge"),
    "predictive": ("ScorePopulation",),
    "protocol": ("GenerationEngine", "LogitsProcessor", "Rollout", "SamplingParams"),
    "rewards": ("ConstitutionalRewardWrapper", "RewardFunctionFactory", "RewardFunctions", "RewardScores"),
    "scorers": ("JudgeReward", "ProcessReward", "load_scorer"),
    "stopping": ("ConfidenceBasedStopping",),
    "vllm_engine": ("VLLMEngine",),
    "vllm_remote": ("VLLMServerEngine",),
    "vllm_server": ("VLLMServer",),
    "vllm_settings": ("VLLMSettings",),
    "weight_folder": ("write_weight_folder",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_infer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_infer.{_MODULE_OF[name]}"), name)
