"""Steps of each arm for an equal budget: measured in a few steps, then fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from rlhf_data import UserError
from rlhf_train.comparison.plan import Unit

PILOT_STEPS = 4
"""Steps of the pilot of an arm; the first one warms up and is left out."""


def spent_per_step(rows: Sequence[dict[str, Any]], unit: Unit) -> float:
    """Cost of one step of an arm."""
    if unit == "steps":
        return 1.0
    steps = [row for row in rows if "step_time" in row]
    measured = steps[1:] or steps
    if unit == "seconds":
        found = [row["step_time"] for row in measured]
    elif unit == "samples":
        found = [
            row["samples_per_second"] * row["step_time"] for row in measured if "samples_per_second" in row
        ]
    else:
        counts = [row["num_tokens"] for row in steps if "num_tokens" in row]
        found = [after - before for before, after in zip([0.0, *counts], counts, strict=False)]
    spent = median(found) if found else 0.0
    if not spent > 0:
        raise UserError(
            f"the pilot of {PILOT_STEPS} steps spent no {unit}; take another unit for --budget",
            code="missing_metric",
        )
    return spent


def steps_of(budget: float, per_step: float) -> int:
    """Steps that come nearest to a budget."""
    if budget < per_step:
        raise UserError(
            f"one step takes {per_step:,.4g}, more than --budget with its {budget:,.10g}; raise it, or make "
            "steps smaller, as with per_device_train_batch_size",
            code="budget_too_small",
        )
    return math.floor(budget / per_step + 0.5)


def measured_steps(steps: int, evaluations: int) -> list[int]:
    """After which steps a run's policy is measured: at equal distances, and at the end."""
    every = math.ceil(steps / evaluations)
    return [*range(every, steps, every), steps]
