"""Validation of the values that reward functions return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from rlhf_data import UserError
from rlhf_infer.rewards.conventions import Samples
from rlhf_infer.rewards.texts import sample_name

_LARGEST = torch.finfo(torch.float32).max
_SHOWN = 80
"""Characters of a wrong value that messages show."""


def checked_rewards(values: Any, name: str, samples: Samples) -> list[float]:
    """The rewards of B samples as numbers, NaN for None."""
    count = len(samples.completions)
    where = f"reward function {name}"
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UserError(
            f"{where} returned {shown(values)}; expected a list of {count} numbers or None, one for each "
            f"completion from {sample_name(0, samples.completions[0])} on",
            code="not_a_list",
        )
    if len(values) != count:
        last = min(len(values), count - 1)
        which = "the first without one is" if len(values) < count else "the last completion is"
        raise UserError(
            f"{where} returned {len(values)} rewards for {count} completions; {which} "
            f"{sample_name(last, samples.completions[last])}: return exactly one for each",
            code="wrong_number_of_rewards",
        )
    return [_checked_value(value, where, i, samples) for i, value in enumerate(values)]


def _checked_value(value: Any, where: str, index: int, samples: Samples) -> float:
    if value is None:
        return math.nan
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not abs(number) <= _LARGEST:
        raise UserError(
            f"{where}, {sample_name(index, samples.completions[index])}: returned {shown(value)}; "
            "expected a finite number, or None where it is not applicable",
            code="invalid_reward",
            index=index,
        )
    return number


def shown(value: Any) -> str:
    """A value as messages show it: its type and the beginning of its repr."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else f'{text[:_SHOWN]}…'}"
