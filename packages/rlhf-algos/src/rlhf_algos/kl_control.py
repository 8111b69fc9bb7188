"""Coefficients of a KL penalty: fixed, or moved so that the divergence stays near a target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

_LARGEST_ERROR = 0.2
"""Bound of the relative error, both ways: https://arxiv.org/abs/1909.08593, section 2.2."""


class KLController(Protocol):
    """The protocol of KL controllers."""

    value: float
    """The coefficient now, >= 0."""

    def update(self, current: float, steps: int) -> None:
        """Move the coefficient after a measurement of the divergence.

        `current` is the KL from the reference in nats per completion, `steps` the completions since the last
        update.
        """
        ...

    def state(self) -> dict[str, float]:
        """The state to resume from, as JSON."""
        ...

    def load_state(self, state: Mapping[str, float]) -> None:
        """Load what `state` returned."""
        ...


class FixedKLController:
    """A coefficient that stays.

    Raises:
        ValueError: it is negative or not finite.
    """

    def __init__(self, value: float) -> None:
        self.value = _checked("value", value)

    def update(self, current: float, steps: int) -> None:
        """Do nothing."""

    def state(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Do nothing: the coefficient is a setting."""


class AdaptiveKLController:
    """A coefficient that rises while the divergence is above a target and falls while it is below.

    value <- value · (1 + clip(current / target - 1, -0.2, 0.2) · steps / horizon)

    https://arxiv.org/abs/1909.08593, section 2.2.

    Args:
        init: the coefficient at first, > 0.
        target: KL to aim at, > 0, in nats per completion, as `current`.
        horizon: completions over which a divergence 20% off moves the coefficient by 20%, > 0; it must be
            more than a fifth of the completions of an update.

    Raises:
        ValueError: one of them is out of its range.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        for name, value in (("init", init), ("target", target), ("horizon", horizon)):
            if _checked(name, value) == 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        self.value, self.target, self.horizon = init, target, horizon

    def update(self, current: float, steps: int) -> None:
        """Move the coefficient.

        `current` is the KL measured over the `steps` completions since the last update.

        Raises:
            ValueError: `current` is not finite, or the coefficient could become 0 in that many `steps`.
        """
        if not math.isfinite(current):
            raise ValueError(f"current KL must be finite, got {current}")
        check_horizon(steps, self.horizon)
        error = max(-_LARGEST_ERROR, min(_LARGEST_ERROR, current / self.target - 1))
        self.value *= 1 + error * steps / self.horizon

    def state(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient that `state` returned."""
        self.value = state["value"]


def check_horizon(steps: int, horizon: float) -> None:
    """Refuse an update over more steps than an `AdaptiveKLController` can take without falling to 0.

    Raises:
        ValueError: `steps` are negative or not below five times the horizon.
    """
    if not 0 <= steps * _LARGEST_ERROR < horizon:
        raise ValueError(
            f"steps must be from 0 to below {1 / _LARGEST_ERROR:g} times the horizon, which is "
            f"{horizon:g}, got {steps}; raise the horizon"
        )


def _checked(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")
    return value
