"""What a job of an online method has besides model and data: rewards, engine, value model, pre-flight."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rlhf_algos.configs.online import PPOConfig
from rlhf_algos.jobs.models import job_device, lora_settings
from rlhf_algos.online.first_rollout import check_first_rollout
from rlhf_algos.online.ppo import start_value_model
from rlhf_data import RunFolder, atomic_write_json, model_folder
from rlhf_infer import RewardFunctionFactory, RewardFunctions
from rlhf_models import (
    ENSEMBLE_FILE,
    ValueHead,
    ValueModel,
    adapter_base,
    brings_head,
    check_scoring_model,
    check_weights,
    is_adapter,
    load_config,
)

__all__ = ["PREFLIGHT", "check_parts", "load_rewards", "online_parts", "tell_findings"]

_LOG = logging.getLogger(__name__)
PREFLIGHT = "preflight.json"
_HOLDS_MODELS = ("model:", "constitutional:", "judge:path=")
"""Lines that name models beside other things."""


def check_parts(config: Any) -> None:
    """Refuse rewards and a value model that cannot be made; models are looked for, not loaded.

    Not covered: models that lines beginning with `model:`, `constitutional:` or `judge:path=` name, and
    whether a URL answers.

    Args:
        config: the job's settings.

    Raises:
        UserError: one of them is unknown, or not there.
    """
    for spec in config.reward:
        if spec and ":" not in spec and ("/" in spec or Path(spec).is_dir()):
            _check_model(spec, scores=True)
        elif not spec.startswith(_HOLDS_MODELS):
            RewardFunctionFactory.from_spec(spec)
    if isinstance(config, PPOConfig) and config.value_model_path:
        _check_model(config.value_model_path, scores=False)


def _check_model(name: str, *, scores: bool) -> None:
    """Refuse a model that is not there; with `scores` also a language model."""
    name = model_folder(name)
    if (Path(name) / ENSEMBLE_FILE).is_file():
        return
    base = adapter_base(name) if is_adapter(name) else name
    if scores and not (base != name and brings_head(name)):
        check_scoring_model(base)
    load_config(base)
    if base == name:
        check_weights(name)


def load_rewards(config: Any) -> RewardFunctions:
    """The rewards of a job; all are looked at before the first model is loaded.

    Raises:
        UserError: one of them cannot be used.
    """
    check_parts(config)
    options = {"device": job_device()}
    functions = [RewardFunctionFactory.from_spec(spec, model_options=options) for spec in config.reward]
    return RewardFunctions(functions, weights=config.reward_weights)


def online_parts(
    config: Any, model: Any, tokenizer: Any, run: RunFolder, rewards: RewardFunctions
) -> dict[str, Any]:
    """What the trainer of an online method takes besides the arguments of every trainer.

    Args:
        config: the job's settings.
        model: the policy.
        tokenizer: of the policy.
        run: the job's folder.
        rewards: of the job.

    Raises:
        UserError: the value model or vLLM cannot be used.
    """
    parts: dict[str, Any] = {"rewards": rewards}
    if isinstance(config, PPOConfig):
        parts["value_model"] = _value_model(config, model, tokenizer)
    if config.use_vllm:
        from rlhf_algos.online.vllm import vllm_engine

        parts["engine"] = vllm_engine(config, model, tokenizer, run)
    return parts


def _value_model(config: Any, model: Any, tokenizer: Any) -> ValueModel | ValueHead:
    """The value model that PPO starts with; with adapters where the policy has some."""
    value_model = start_value_model(model, tokenizer, config)
    if isinstance(value_model, ValueModel) and config.use_peft:
        value_model.add_lora(lora_settings(config), seed=config.seed)
    return value_model


def tell_findings(trainer: Any, run: RunFolder) -> None:
    """Sample the first prompts, say what would make the run a dead one, and keep it as `preflight.json`."""
    findings = check_first_rollout(trainer)
    if not trainer.parallel.is_main:
        return
    for finding in findings:
        _LOG.warning("%s", finding.text)
    rows = [{"level": each.level, "name": each.name, "text": each.text} for each in findings]
    atomic_write_json(run.path / PREFLIGHT, rows)
