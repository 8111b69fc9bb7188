"""Settings that are given and have no effect with the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_minmax.config.run import MinMaxConfig

_GAINS = ("proportional_gain", "derivative_gain")
_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
_NOT_TRAINED = "training.monitor_updates_per_policy is 0, and the monitor is not trained"


def unused_settings(config: MinMaxConfig, steps: int) -> list[str]:
    """Settings that differ from their defaults and do nothing in a run of `steps` steps, and why."""
    found = []
    for section, names, why in (*_unused(config), *_too_late(config, steps)):
        values: Any = getattr(config, section)
        fields = type(values).model_fields
        changed = [name for name in names if getattr(values, name) != fields[name].default]
        if changed:
            keys = " and ".join(f"{section}.{name}" for name in changed)
            found.append(f"{keys} {'does' if len(changed) == 1 else 'do'} nothing: {why}")
    return found


def _unused(config: MinMaxConfig) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Sections, names of settings in them that do nothing, and why."""
    yield from _of_the_players(config)
    rule = config.constraint.rule
    if rule == "fixed":
        names = ("step_size", "warmup_steps", "lambda_min", "lambda_max", *_GAINS)
        yield "constraint", names, "constraint.rule is fixed"
    elif rule != "pid":
        yield "constraint", _GAINS, f"constraint.rule is {rule}, not pid"
    if config.training.monitor_updates_per_policy == 0:
        yield "training", ("monitor_learning_rate", "monitor_steps"), _NOT_TRAINED
        if config.training.monitor_warmup_steps:
            why = f"{_NOT_TRAINED}; nobody learns in these steps, so set it to 0"
            yield "training", ("monitor_warmup_steps",), why
    if config.game.w_judge is not None:
        why = f"game.w_judge is {config.game.w_judge:g}, and is not derived from the break-even weight"
        yield "game", ("break_even_factor", "break_even_share"), why
    if config.judge_model.checks == "all":
        yield "game", ("policy_critiques",), "judge_model.checks is all, and all evidence is checked"
    if config.data.train_data is not None:
        yield "data", ("world",), "the stories come from data.train_data"


def _too_late(config: MinMaxConfig, steps: int) -> Iterator[tuple[str, tuple[str, ...], str]]:
    why = f"the run has {steps} steps"
    for section, name in (("training", "eval_steps"), ("diagnostics", "cross_play_steps")):
        every = getattr(getattr(config, section), name)
        if every is not None and every > steps:
            yield section, (name,), why
    stands = config.training.monitor_steps
    if stands is not None and stands >= steps and config.training.monitor_updates_per_policy:
        yield "training", ("monitor_steps",), why


def _of_the_players(config: MinMaxConfig) -> Iterator[tuple[str, tuple[str, ...], str]]:
    for role in ("policy_model", "monitor_model"):
        player = getattr(config, role)
        if not player.use_lora:
            yield role, _LORA, f"{role}.use_lora is false"
        if player.baseline != "critic":
            yield role, ("lam", "vf_coef"), f"{role}.baseline is {player.baseline}, not critic"
