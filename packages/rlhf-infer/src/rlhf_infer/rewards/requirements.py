"""Requirements of reward functions: the columns they read, and the device they compute on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any

from rlhf_data import UserError
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


def check_columns(functions: Mapping[str, RewardFunction], columns: Mapping[str, Sequence[Any]]) -> None:
    """Refuse rows that no function can score, for want of a column, before anything is computed for them.

    Args:
        functions: at least one, by name.
        columns: the values of the rows by column, None where a row has none.

    Raises:
        UserError: every function reads a column that none of the rows has.
    """
    present = {name for name, values in columns.items() if any(value is not None for value in values)}
    lacking = {
        name: next((column for column in needed_columns(function) if column not in present), None)
        for name, function in functions.items()
    }
    if None not in lacking.values():
        name, column = next(iter(lacking.items()))
        raise UserError(
            f"reward {name} reads the column {column}, which no row here has; add it to the rows, or give "
            "another reward",
            code="missing_column",
            column=column,
        )


def check_column_lengths(columns: Mapping[str, Sequence[Any]], prompts: int) -> None:
    """Refuse columns that do not have a value for each prompt."""
    for name, values in columns.items():
        if len(values) != prompts:
            raise UserError(
                f"column {name} has {len(values)} values for {prompts} prompts; expected one each",
                code="wrong_column_length",
                column=name,
            )


def computes_with_torch(function: RewardFunction) -> bool:
    """Whether a reward function's work is that of a torch model in this process: its own, or its judge's."""
    import torch

    def has_model(holder: Any) -> bool:
        parts = (getattr(holder, name, None) for name in _MODELS)
        return any(isinstance(part, torch.nn.Module) for part in parts)

    return has_model(function) or has_model(getattr(function, "judge", None))
