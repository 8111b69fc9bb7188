"""Updates of a constraint's multiplier: none, or one of four rules of dual ascent."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

DualRule = Literal["fixed", "multiplicative", "additive", "log", "pid"]
_LARGEST_EXPONENT = 700.0
"""exp of it is a float; any multiplier is at its maximum long before."""


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
        proportional_gain: P of `pid`, relative to α.
        derivative_gain: D of `pid`, relative to α.
        warmup_steps: first updates in which the violation is smoothed but the multiplier stays.
    """

    rule: DualRule
    threshold: float
    step_size: float
    smoothing: float = 0.5
    minimum: float = 0.05
    maximum: float = 20.0
    proportional_gain: float = 1.0
    derivative_gain: float = 0.5
    warmup_steps: int = 0


@dataclass(frozen=True)
class DualState:
    """A multiplier and what its rule remembers.

    Args:
        multiplier: λ.
        violation_ema: smoothed violation; None before the first.
        integral: Σe of `pid`, accumulated excess violation.
        proportional: the part α P e of λ that `pid` added last; 0 before it moved λ.
        derivative: its part α D max(0, v̄ - v̄_before); the third part is α Σe.
        updates: steps so far.
        violated: those updates whose smoothed violation was above the threshold.
        cumulative: Σ max(0, v - ε) of the measured violations.
        met: whether the smoothed violation was ever at or below the threshold.
        overshoot: largest excess of the smoothed violation since then; 0 before.
    """

    multiplier: float
    violation_ema: float | None = None
    integral: float = 0.0
    proportional: float = 0.0
    derivative: float = 0.0
    updates: int = 0
    violated: int = 0
    cumulative: float = 0.0
    met: bool = False
    overshoot: float = 0.0

    def saturated(self, settings: DualSettings) -> bool:
        """Whether λ is at one of its bounds; a fixed one has none."""
        return settings.rule != "fixed" and (
            self.multiplier <= settings.minimum or self.multiplier >= settings.maximum
        )


def update_multiplier(state: DualState, violation: float, settings: DualSettings) -> DualState:
    """One step of dual ascent on a violation v, smoothed to v̄; λ stays within its bounds.

    v̄ ← (1 - s) v̄ + s v, then with e = v̄ - ε:

    - `fixed`: λ stays, whatever its bounds.
    - `multiplicative`: λ ← λ (1 + α) if e > 0 else λ (1 - α); blind to the size of the violation.
    - `additive`: λ ← λ + α e (gradient ascent on the Lagrangian; RCPO, https://arxiv.org/abs/1805.11074).
    - `log`: λ ← λ exp(α e) (exponentiated gradient ascent; Safe RLHF, https://arxiv.org/abs/2310.12773,
      eq. 31, ascends ln λ too, with a further factor λ in the step).
    - `pid`: λ ← α (P e + Σe + D max(0, v̄ - v̄_before)) (https://arxiv.org/abs/2007.03964, algorithm 2), Σe
      kept within [0, λ_max / α], so that a multiplier at its cap comes down as soon as the constraint holds.

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
    proportional, derivative = state.proportional, state.derivative
    if settings.rule == "fixed" or state.updates < settings.warmup_steps:
        pass
    elif settings.rule == "multiplicative":
        multiplier *= 1 + settings.step_size if excess > 0 else 1 - settings.step_size
    elif settings.rule == "additive":
        multiplier += settings.step_size * excess
    elif settings.rule == "log":
        multiplier *= math.exp(min(settings.step_size * excess, _LARGEST_EXPONENT))
    else:
        integral = min(max(0.0, integral + excess), settings.maximum / settings.step_size)
        proportional = settings.step_size * settings.proportional_gain * excess
        derivative = settings.step_size * settings.derivative_gain * max(0.0, smoothed - before)
        multiplier = proportional + settings.step_size * integral + derivative
    if settings.rule != "fixed":
        multiplier = min(max(multiplier, settings.minimum), settings.maximum)
    return replace(
        state,
        multiplier=multiplier,
        violation_ema=smoothed,
        integral=integral,
        proportional=proportional,
        derivative=derivative,
        updates=state.updates + 1,
        violated=state.violated + (excess > 0),
        cumulative=state.cumulative + max(0.0, violation - settings.threshold),
        met=state.met or excess <= 0,
        overshoot=max(state.overshoot, excess) if state.met else 0.0,
    )
