"""Training dynamics: the two players' time scales, oscillation of the game's value, and rollbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlhf_minmax.config.training import TIME_SCALE_LIMIT
from rlhf_minmax.evaluation.diagnostics import oscillation

_WINDOW = 16
"""Steps over which oscillation of the game's value is measured."""
_JUDGED_FROM = 8
"""Steps of a learning policy before a time scale is judged."""


@dataclass
class Dynamics:
    """Sums over a run: how far each player was allowed to move; plain values, for checkpoints.

    Args:
        monitor_travel: Σ learning rate x updates of the monitor in steps in which the policy learned.
        policy_travel: the same of the policy.
        policy_steps: steps in which it learned.
        values: the game's values in the last steps.
        rollbacks: rollbacks of the monitor so far.
        policy_rollbacks: rollbacks of the policy so far.
        warned: whether a time scale out of range was reported.
    """

    monitor_travel: float = 0.0
    policy_travel: float = 0.0
    policy_steps: int = 0
    values: list[float] = field(default_factory=list)
    rollbacks: float = 0.0
    policy_rollbacks: float = 0.0
    warned: bool = False

    def update(self, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Record a step.

        It reads the metrics `monitor/updates`, `policy/updates` where the policy learned, both learning rates
        and `minmax/value`.

        Returns:
            `dynamics/update_ratio` (monitor's updates per update of the policy in this step, None if it
            did not learn), `dynamics/time_scale` (learning rate x updates, monitor to policy, over the run so
            far) and `dynamics/oscillation` (of the last values of the game).
        """
        self.values = [*self.values, float(metrics["minmax/value"])][-_WINDOW:]
        found: dict[str, float | None] = {"dynamics/oscillation": oscillation(self.values)}
        policy = metrics.get("policy/updates", 0)
        ratio = None
        if policy:
            monitor = metrics.get("monitor/updates", 0)
            self.monitor_travel += metrics["monitor/learning_rate"] * monitor
            self.policy_travel += metrics["policy/learning_rate"] * policy
            self.policy_steps += 1
            ratio = monitor / policy
        return found | {"dynamics/update_ratio": ratio, "dynamics/time_scale": self.time_scale}

    @property
    def time_scale(self) -> float | None:
        """The monitor's travel divided by the policy's, so far; None before the policy has learned."""
        return self.monitor_travel / self.policy_travel if self.policy_travel else None

    def time_scale_warning(self) -> str | None:
        """A warning that one player moved more than ten times as far as the other; given once."""
        scale = self.time_scale
        if scale is None or self.warned or self.policy_steps < _JUDGED_FROM:
            return None
        if 1 / TIME_SCALE_LIMIT <= scale <= TIME_SCALE_LIMIT:
            return None
        self.warned = True
        if scale == 0:
            return (
                f"the monitor has stood still in all {self.policy_steps} steps in which the policy learned; "
                "look at its learning rate"
            )
        fast, slow = ("monitor", "policy") if scale > 1 else ("policy", "monitor")
        times = scale if scale > 1 else 1 / scale
        return (
            f"the {fast} has been moving {times:.0f} times as far as the {slow} (learning rate x updates "
            "made); look at the KL stop and at both learning rates"
        )

    def rollback_warning(self, metrics: Mapping[str, Any]) -> str | None:
        """Warning about a rollback of a player in this step."""
        before = self.rollbacks, self.policy_rollbacks
        self.rollbacks = metrics.get("guard/rollbacks", self.rollbacks)
        self.policy_rollbacks = metrics.get("guard/policy_rollbacks", self.policy_rollbacks)
        if self.policy_rollbacks > before[1]:
            return (
                "the policy had collapsed and was put back to where its value was best; lower "
                "training.policy_learning_rate if that happens again"
            )
        if self.rollbacks > before[0]:
            return (
                "the monitor had collapsed and was put back to where it was last good; "
                "lower training.monitor_learning_rate, or raise game.beta or constraint.lambda_max"
            )
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
