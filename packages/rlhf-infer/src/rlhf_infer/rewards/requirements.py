"""Requirements of reward functions: the columns they read, and the device they compute on."""

from __future__ import annotations

import inspect
from inspect import Parameter
from typing import Any

from rlhf_infer.rewards.conventions import NOT_COLUMNS, RewardFunction

_GIVEN = ("prompts", "completions", "completion_ids", *NOT_COLUMNS)
_OPENRLHF, _VERL = ("queries", "labels"), ("data_source", "solution_str", "extra_info")
_MODELS = ("model", "ensemble", "judge")


def needed_columns(function: RewardFunction) -> tuple[str, ...]:
    """Columns without which a reward function cannot score, as far as it says so.

    A checker of answers says it with `required_columns`, a judge of critiques with `critiques`, any other
    function with the parameters that it requires; verl's `ground_truth` may come from several columns, of
    which it is named.
    """
    named = getattr(function, "required_columns", None) or getattr(function, "critiques", None)
    if named:
        return (named,) if isinstance(named, str) else tuple(named)
    parameters = inspect.signature(function).parameters.values()
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is Parameter.empty
        and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    if len(required) == 1 and required[0] not in _VERL:
        return ()  # the only parameter gets the completions, whatever its name
    return tuple(name for name in required if name not in (*_GIVEN, *_OPENRLHF, *_VERL))


def computes_with_torch(function: RewardFunction) -> bool:
    """Whether a reward function's work is that of a torch model in this process: its own, or its judge's."""
    import torch

    def has_model(holder: Any) -> bool:
        parts = (getattr(holder, name, None) for name in _MODELS)
        return any(isinstance(part, torch.nn.Module) for part in parts)

    return has_model(function) or has_model(getattr(function, "judge", None))
