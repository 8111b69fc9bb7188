"""Guards: they detect a player that has collapsed, and restore its last good parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_minmax.config.constraints import GuardConfig
from rlhf_minmax.players.snapshots import copies, fill, load_copies, save_copies

_WORSE = 0.1
"""Smoothed violation by which the last good monitor must have been better."""
_SMOOTHING = 0.7
"""Weight of the previous smoothed value in the policy's moving average."""


def collapse(
    config: GuardConfig,
    *,
    false_positive_rate: float | None,
    false_negative_rate: float | None,
    zero_std: float,
    excess: float,
    saturated: bool,
) -> str | None:
    """Whether a step of the monitor looks collapsed, and how, as text.

    Two signs, both only while truthfulness is violated: every verdict is the same with λ at its cap, so that
    the constraint cannot pull harder; or critiques of an answer all get one reward, so that nothing pulls.

    Args:
        config: thresholds.
        false_positive_rate: share of right answers called wrong; None without a right answer.
        false_negative_rate: share of wrong answers called right; None without a wrong answer.
        zero_std: share of groups without spread.
        excess: smoothed violation minus its threshold.
        saturated: whether λ is at its cap.
    """
    if excess <= 0:
        return None
    for rate, what in (
        (false_positive_rate, "calls {:.0%} of right answers wrong"),
        (false_negative_rate, "calls {:.0%} of wrong answers right"),
    ):
        if saturated and rate is not None and rate >= config.one_sided_rate:
            return f"the monitor {what.format(rate)} with its multiplier at the cap"
    if zero_std > config.zero_std_share:
        return f"{zero_std:.0%} of the groups of critiques have no spread of rewards, and truth is violated"
    return None


class _Keeper:
    """Copies of a player's parameters: the good ones, those that a step measured, and the newest.

    What a step measures belongs to the player as the step found it, not to the updated one.

    Attributes:
        good: copies of the parameters of the last good player.
        rollbacks: how often it was put back.
    """

    def __init__(self, config: GuardConfig, parameters: Sequence[Tensor]) -> None:
        self.config, self.parameters, self.rollbacks = config, list(parameters), 0
        self.good = self._measured = self._newest = self._copy()

    def _next(self) -> None:
        """A step is over: what was the newest has been measured."""
        self._measured, self._newest = self._newest, self._copy()

    def _put_back(self) -> None:
        fill(self.parameters, self.good)
        self._newest = self.good
        self.rollbacks += 1

    def _copy(self) -> list[Tensor]:
        return copies(self.parameters, "cpu") if self.config.rollback else []

    def save(self, folder: Path) -> None:
        """Write the last good player, for a checkpoint; every process must call it."""
        if self.good:
            pairs = enumerate(zip(self.parameters, self.good, strict=True))
            save_copies(folder, ((f"{number:06d}", *pair) for number, pair in pairs))

    def _load(self, folder: Path) -> None:
        """Restore the state that `save` wrote; the parameters are the checkpoint's already."""
        if self.good:
            known = {f"{number:06d}": each for number, each in enumerate(self.parameters)}
            found = dict(load_copies(folder, known))
            self.good = [found[name].cpu() for name in known]
        self._newest = self._copy()


class PolicyGuard(_Keeper):
    """Keeps the policy whose smoothed value was the best, and puts it back when the value has fallen far.

    A single update can take a policy that hardly explores any more to wrong answers, and its own samples then
    do not lead back. The value of an answer is what the policy is paid for it, reward model and judge.
    """

    def __init__(self, config: GuardConfig, parameters: Sequence[Tensor]) -> None:
        super().__init__(config, parameters)
        self.value: float | None = None
        self.best: float | None = None

    def observe(self, value: float, scale: float) -> bool:
        """Record a step's mean value, after its update; whether the policy has collapsed.

        Args:
            value: of the answers that the policy gave as the step found it.
            scale: w_reward + w_judge, the weights of standardised scores: the unit of `guards.value_drop`.
        """
        self._next()
        before = value if self.value is None else self.value
        self.value = _SMOOTHING * before + (1 - _SMOOTHING) * value
        if self.best is None or self.value >= self.best:
            self.best, self.good = self.value, self._measured
            return False
        return self.best - self.value > self.config.value_drop * scale

    def roll_back(self) -> None:
        """Restore the best policy and start measuring its value again."""
        self._put_back()
        self.value = self.best = None

    def to_dict(self) -> dict[str, Any]:
        """Values and the count, for a checkpoint."""
        return {"value": self.value, "best": self.best, "rollbacks": self.rollbacks}

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore what `to_dict` gave and `save` wrote; the parameters are the checkpoint's already."""
        self.value, self.best, self.rollbacks = state["value"], state["best"], state["rollbacks"]
        self._load(folder)


class MonitorGuard(_Keeper):
    """Keeps the last good monitor, and counts collapsed steps.

    A monitor is good where its smoothed violation is within the threshold, or the lowest so far.
    """

    def __init__(self, config: GuardConfig, parameters: Sequence[Tensor]) -> None:
        super().__init__(config, parameters)
        self.collapsed_steps = 0
        self.lowest: float | None = None
        self._good_state: dict[str, Any] | None = None

    def remember(self, violation_ema: float, threshold: float, known: dict[str, Any]) -> None:
        """Keep the monitor of the last `observe` if it is good, with `known`, its state."""
        if violation_ema <= threshold or self.lowest is None or violation_ema < self.lowest:
            self.lowest = violation_ema
            self.good, self._good_state = self._measured, known

    def is_worse(self, violation_ema: float) -> bool:
        """Whether the last good monitor was clearly better, so that going back to it would help."""
        return self.lowest is not None and violation_ema > self.lowest + _WORSE

    def observe(self, sign: str | None) -> bool:
        """Count a step that looks collapsed (`sign`) or not, after its updates of the monitor.

        Returns:
            Whether the monitor has collapsed by now.
        """
        self._next()
        self.collapsed_steps = 0 if sign is None else self.collapsed_steps + 1
        return self.collapsed_steps >= self.config.patience

    def pass_over(self) -> None:
        """Record a step without a measurement; the next one measures the monitor it leaves."""
        self._newest = self._copy()

    def roll_back(self) -> dict[str, Any] | None:
        """Restore the last good monitor; the state kept with it, None for the start."""
        self._put_back()
        self.collapsed_steps = 0
        return self._good_state

    def to_dict(self) -> dict[str, Any]:
        """Counts and what is known of the good monitor, for a checkpoint."""
        return {
            "collapsed_steps": self.collapsed_steps,
            "rollbacks": self.rollbacks,
            "lowest": self.lowest,
            "known": self._good_state,
        }

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore what `to_dict` gave and `save` wrote; the parameters are the checkpoint's already."""
        self.collapsed_steps, self.rollbacks = state["collapsed_steps"], state["rollbacks"]
        self.lowest, self._good_state = state["lowest"], state["known"]
        self._load(folder)
