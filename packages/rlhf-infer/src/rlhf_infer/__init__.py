"""Generation engines, reward functions and judges for RLHF."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "sampling.budget": ("AdaptiveComputeAllocator",),
    "judges.api": ("APIJudge", "APIUsage"),
    "sampling.best_of_n": ("BestOfNSampler",),
    "sampling.candidates": ("Candidate", "SamplingCost", "Selected", "Selection", "select"),
    "engines.continuous_batching": ("ContinuousBatcher",),
    "engines.transformers_engine": ("TransformersEngine",),
    "sampling.ensemble_policy": ("EnsemblePolicy",),
    "http_client": ("ScorerUnavailable",),
    "judges.settings": ("APISettings",),
    "judges.prompted": ("Judge", "PromptedJudge", "RuleJudge", "verdict_rule"),
    "judges.pairwise": ("Comparison", "PairwiseJudge"),
    "sampling.score_model": ("ScorePopulation",),
    "engines.protocol": ("GenerationEngine", "LogitsProcessor", "Rollout", "SamplingParams"),
    "rewards": ("ConstitutionalRewardWrapper", "RewardFunctionFactory", "RewardFunctions", "RewardScores"),
    "sampling.scorers": ("JudgeReward", "ProcessReward", "load_scorer"),
    "sampling.confidence_stopping": ("ConfidenceBasedStopping",),
    "vllm.engine": ("VLLMEngine",),
    "vllm.server_engine": ("VLLMServerEngine",),
    "vllm.process": ("VLLMServer",),
    "vllm.settings": ("VLLMSettings",),
    "vllm.weight_export": ("write_weight_folder",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_infer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_infer.{_MODULE_OF[name]}"), name)
