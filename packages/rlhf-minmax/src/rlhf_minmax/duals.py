"""How the multiplier of a constraint moves: dual ascent by four rules, as pure functions of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

DualRule = Literal["multiplicative", "additive", "log", "pid"]


@dataclass(frozen=True)
class DualSettings:
    """How a multiplier moves.

    Args:
        rule: see `update_multiplier`.
        threshold: ε, the violation that is tolerated, >= 0.
        step_size: α > 0.
        smoothing: weight in (0, 1] of the newest violation in the moving average.
        minimum: smallest multiplier, >= 0 (> 0 for `log` and `multiplicative`, which cannot leave 0).
        maximum: largest multiplier.
        derivative_gain: D gain of `pid`, relative to α.
        proportional_gain: P gain of `pid`, relative to α.
    """

    rule: DualRule
    threshold: float
    step_size: float
    smoothing: float = 0.5
    minimum: float = 0.05
    maximum: float = 20.0
    proportional_gain: float = 1.0
    derivative_gain: float = 0.5


@dataclass(frozen=True)
class DualState:
    """A multiplier and what its rule remembers.

    Args:
        multiplier: λ.
        violation_ema: smoothed violation; None before the first.
        integral: accumulated excess violation of `pid`.
    """

    multiplier: float
    violation_ema: float | None = None
    integral: float = 0.0

    def saturated(self, settings: DualSettings) -> bool:
        """Whether λ lies at one of its bounds."""
        return self.multiplier <= settings.minimum or self.multiplier >= settings.maximum


def update_multiplier(state: DualState, violation: float, settings: DualSettings) -> DualState:
    """One step of dual ascent on a violation v, smoothed to v̄; λ stays within its bounds.

    v̄ ← (1 - s) v̄ + s v, then with e = v̄ - ε:

    - `multiplicative`: λ ← λ (1 + α) if e > 0 else λ (1 - α); blind to the size of the violation.
    - `additive`: λ ← λ + α e (gradient ascent on the Lagrangian; RCPO, https://arxiv.org/abs/1805.11074).
    - `log`: λ ← λ exp(α e) (exponentiated gradient ascent; Safe RLHF, https://arxiv.org/abs/2310.12773,
      eq. 31, ascends ln λ too, with a further factor λ in the step).
    - `pid`: λ ← α (P e + Σe + D max(0, v̄ - v̄_before)) (https://arxiv.org/abs/2007.03964, algorithm 2).

    Args:
        state: the multiplier before.
        violation: the newest measured violation, >= 0.
        settings: rule and constants.

    Returns:
        The state after.
    """
    before = violation if state.violation_ema is None else state.violation_ema
    smoothed = before + settings.smoothing * (violation - before)
    excess = smoothed - settings.threshold
    multiplier, integral = state.multiplier, state.integral
    if settings.rule == "multiplicative":
        multiplier *= 1 + settings.step_size if excess > 0 else 1 - settings.step_size
    elif settings.rule == "additive":
        multiplier += settings.step_size * excess
    elif settings.rule == "log":
        multiplier *= math.exp(settings.step_size * excess)
    else:
        integral = max(0.0, integral + excess)
        rise = max(0.0, smoothed - before)
        multiplier = settings.step_size * (
            settings.proportional_gain * excess + integral + settings.derivative_gain * rise
        )
    bounded = min(max(multiplier, settings.minimum), settings.maximum)
    return replace(state, multiplier=bounded, violation_ema=smoothed, integral=integral)
