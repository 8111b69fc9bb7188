"""The constraint of a run and its multiplier, which is updated from the violations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rlhf_minmax.dual_ascent import DualSettings, DualState, update_multiplier

TRUTHFULNESS = "truthfulness"
"""The monitor's constraint, whose metrics have short names too, such as `dual/lambda`."""


class Controller:
    """One constraint's multiplier, moved by dual ascent."""

    def __init__(self, name: str, settings: DualSettings, start: float) -> None:
        self.name, self.settings = name, settings
        self.state = DualState(start, integral=start / settings.step_size)

    @property
    def is_off(self) -> bool:
        """Whether nothing is constrained: the multiplier is 0 and stays there."""
        return self.settings.rule == "fixed" and self.state.multiplier == 0

    def update(self, violation: float | None) -> dict[str, float | None]:
        """Move the multiplier by a measured violation, or leave it without one; `metrics` then."""
        if violation is not None:
            self.state = update_multiplier(self.state, violation, self.settings)
        return self.metrics(violation)

    def metrics(self, violation: float | None) -> dict[str, float | None]:
        """`constraint/<name>/...` and `dual/<name>/...`; None for what has not been measured.

        With rule `pid` `dual/<name>/p`, `i` and `d` add up to λ before its bounds.
        """
        state = self.state
        values: dict[str, float | None] = {
            "constraint/{}/violation": violation,
            "constraint/{}/violation_ema": state.violation_ema,
            "constraint/{}/fraction": state.violated / state.updates if state.updates else None,
            "constraint/{}/cumulative": state.cumulative,
            "constraint/{}/overshoot": state.overshoot,
            "dual/{}/lambda": state.multiplier,
            "dual/{}/saturated": float(state.saturated(self.settings)),
        }
        if state.multiplier > 0:
            values["dual/{}/log_lambda"] = math.log(state.multiplier)
        if self.settings.rule == "pid":
            parts = state.proportional, self.settings.step_size * state.integral, state.derivative
            values |= {f"dual/{{}}/{part}": value for part, value in zip("pid", parts, strict=True)}
        return {name.format(self.name): value for name, value in values.items()}

    def to_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        return asdict(self.state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `to_dict` returned."""
        self.state = DualState(**state)

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Restore λ and its rule's memory from what `to_dict` returned; counters keep counting."""
        names = ("multiplier", "violation_ema", "integral", "proportional", "derivative")
        moved = {name: state[name] for name in names}
        self.state = replace(self.state, **moved)


def under_short_names(metrics: dict[str, float | None]) -> dict[str, float | None]:
    """Truthfulness' metrics, the most important also under short names."""
    short = {
        "constraint/violation": f"constraint/{TRUTHFULNESS}/violation",
        "constraint/violation_ema": f"constraint/{TRUTHFULNESS}/violation_ema",
        "dual/lambda": f"dual/{TRUTHFULNESS}/lambda",
        "dual/saturated": f"dual/{TRUTHFULNESS}/saturated",
    }
    return {name: metrics[long] for name, long in short.items()} | metrics
