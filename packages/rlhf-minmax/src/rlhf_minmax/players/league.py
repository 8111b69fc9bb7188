"""League play: when a past opponent is sampled, and how it scores."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from rlhf_minmax.config.schedule import PoolConfig
from rlhf_minmax.players.past_players import Member, OpponentPool
from rlhf_minmax.players.players import Players


@dataclass(frozen=True)
class Opponents:
    """The past players of one step; None if a player meets the present one."""

    policy: Member | None = None
    monitor: Member | None = None


class OpponentPools:
    """A pool of past policies and one of past monitors.

    Who is met in a step depends on the seed and on the members of the pools only.
    """

    def __init__(self, config: PoolConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.policies = OpponentPool(config.size, config.sampling)
        self.monitors = OpponentPool(config.size, config.sampling)

    def choose(self, step: int, *, policy_learns: bool = True) -> Opponents:
        """Whom the players meet in a step; a policy that does not learn meets no one."""
        rng = random.Random(self.seed * 1_000_003 + step)
        chosen = [
            pool.sample(rng) if rng.random() < self.config.share and pool.members else None
            for pool in (self.policies, self.monitors)
        ]
        return Opponents(chosen[0], chosen[1] if policy_learns else None)

    def note(self, opponents: Opponents, metrics: dict[str, float | None]) -> dict[str, float | None]:
        """Record the players' results against past opponents; `pool/...` metrics of the step.

        Of the metrics of the step, the monitor wants `minmax/value` low, and `policy/judged_value` is what
        the policy was paid.
        """
        value, paid = metrics.get("minmax/value"), metrics.get("policy/judged_value")
        if opponents.policy is not None and value is not None:
            self.policies.record(opponents.policy.step, -value)
        if opponents.monitor is not None and paid is not None:
            self.monitors.record(opponents.monitor.step, paid)
        return {
            "pool/size": float(len(self.policies.members)),
            "pool/policy_step": opponents.policy and float(opponents.policy.step),
            "pool/monitor_step": opponents.monitor and float(opponents.monitor.step),
        }

    def take_in(self, step: int, players: Players) -> None:
        """Add both players as they are after a step, if it is time."""
        if self.config.every is not None and step % self.config.every == 0:
            self.policies.add(step, players.policy)
            self.monitors.add(step, players.monitor)

    def save(self, folder: Path, players: Players) -> None:
        """Write both pools into a folder; every process must call it."""
        self.policies.save(folder / "past_policies", players.policy)
        self.monitors.save(folder / "past_monitors", players.monitor)

    def load(self, folder: Path, players: Players) -> None:
        """Take up what `save` wrote."""
        self.policies.load(folder / "past_policies", players.policy)
        self.monitors.load(folder / "past_monitors", players.monitor)
