"""Scheduling of the players: updates of each in a step, and when one of them pauses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_data import BaseConfig


class ScheduleConfig(BaseConfig):
    """How updates are divided between the players."""

    rule: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`: `monitor_updates_per_policy` in every step; `adaptive`: more while the monitor is losing."""
    monitor_target: float = Field(default=0.9, gt=0.5, lt=1)
    """Balanced accuracy at which an adaptive schedule makes `monitor_updates_per_policy` updates."""
    max_monitor_updates: int = Field(default=10, ge=1)
    """Maximum number of monitor updates in a step of an adaptive schedule."""
    freeze_monitor_above: float | None = Field(default=None, gt=0.5, le=1)
    """The monitor pauses while its balanced accuracy is above this; null never."""
    freeze_policy_below: float | None = Field(default=None, ge=0.5, lt=1)
    """The policy pauses while the monitor's balanced accuracy is below this; null never."""
    monitor_refresh: Literal["reuse", "resample"] = "reuse"
    """Whether the monitor's updates in a step share one batch of critiques, or each gets fresh ones."""
    extragradient: bool = False
    """Play every step twice: a round to look ahead, and one at that point, whose updates are made from the
    old point."""
    smoothing: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest balanced accuracy in the moving average that decides."""

    @model_validator(mode="after")
    def _gates_leave_room(self) -> Self:
        low, high = self.freeze_policy_below, self.freeze_monitor_above
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"freeze_policy_below {low} must be below freeze_monitor_above {high}: between the two both "
                "players would never be updated"
            )
        return self


class PoolConfig(BaseConfig):
    """Past players as occasional opponents of the current ones."""

    every: int | None = Field(default=None, ge=1)
    """Add both players to their pools every N steps; null: no pools."""
    size: int = Field(default=8, ge=2)
    """Maximum size of a pool."""
    sampling: Literal["latest", "uniform", "prioritised"] = "uniform"
    """Sampling of past opponents: the newest, uniformly, or preferably those that are hard to beat."""
    share: float = Field(default=0.25, ge=0, le=1)
    """Share of the steps in which a player meets a member instead of the current opponent."""


@dataclass(frozen=True)
class Turn:
    """The updates of one step.

    `monitor_updates` are the most updates of the monitor; 0 freezes it.
    """

    monitor_updates: int
    policy_learns: bool


def next_turn(
    config: ScheduleConfig, accuracy: float | None, *, monitor_updates: int, in_warmup: bool = False
) -> Turn:
    """Divide the updates of a step between the players.

    An adaptive schedule trains the side that is losing: the monitor makes k · (1 - a) / (1 - target) updates,
    rounded, at least 1 and at most `max_monitor_updates`, for a smoothed balanced accuracy a. It makes k
    where its error is that of the target, and twice as many where it errs twice as often.

    Args:
        config: the schedule.
        accuracy: smoothed balanced accuracy of the monitor's verdicts; None before it was measured, which
            changes no number of updates and closes no gate.
        monitor_updates: k, `monitor_updates_per_policy`; 0 for a monitor that is never trained.
        in_warmup: whether only the monitor learns anyway; it is never frozen then.
    """
    updates = monitor_updates
    if accuracy is None:
        return Turn(updates, policy_learns=not in_warmup)
    if config.rule == "adaptive" and updates:
        share = (1 - accuracy) / (1 - config.monitor_target)
        updates = min(max(round(monitor_updates * share), 1), config.max_monitor_updates)
    if in_warmup:
        return Turn(updates, policy_learns=False)
    if config.freeze_monitor_above is not None and accuracy > config.freeze_monitor_above:
        updates = 0
    frozen = config.freeze_policy_below is not None and accuracy < config.freeze_policy_below
    return Turn(updates, policy_learns=not frozen)


def smoothed(before: float | None, newest: float, weight: float) -> float:
    """Exponential moving average: before + weight · (newest - before), starting at the first value."""
    return newest if before is None else before + weight * (newest - before)
