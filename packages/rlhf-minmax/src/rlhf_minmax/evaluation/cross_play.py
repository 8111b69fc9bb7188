"""Every past policy against every past monitor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_data import QARecord
from rlhf_eval import rate
from rlhf_minmax.evaluation.evaluate import greedy_answers, greedy_exchanges, verdict_accuracy
from rlhf_minmax.game.forward_pass import MinMaxPipeline
from rlhf_minmax.players.past_players import Member, playing


@dataclass(frozen=True)
class CrossPlay:
    """Rewards of P policies and M monitors against each other, with greedy decoding.

    A policy that has learned something lasting keeps its value against old and new monitors alike; one that
    runs in circles wins only against the monitors it was trained with.

    Args:
        policy_steps: steps of the P policies.
        monitor_steps: steps of the M monitors.
        values: P rows of M values of the game.
        verdict_accuracy: P rows of M shares of true verdicts on the policy's answers; unparsable is false.
        accuracy: P shares of right answers, on which the monitor has no bearing.
    """

    policy_steps: list[int]
    monitor_steps: list[int]
    values: list[list[float]]
    verdict_accuracy: list[list[float]]
    accuracy: list[float]

    def to_metrics(self) -> dict[str, float]:
        """One key per cell, `minmax/crossplay/{policy step}_{monitor step}` and so on."""
        metrics = {
            f"policy/crossplay_accuracy/{i}": a for i, a in zip(self.policy_steps, self.accuracy, strict=True)
        }
        for name, table in (
            ("minmax/crossplay", self.values),
            ("monitor/crossplay_accuracy", self.verdict_accuracy),
        ):
            for i, row in zip(self.policy_steps, table, strict=True):
                metrics |= {f"{name}/{i}_{j}": x for j, x in zip(self.monitor_steps, row, strict=True)}
        return metrics


def cross_play(
    pipeline: MinMaxPipeline,
    policies: Sequence[Member],
    monitors: Sequence[Member],
    records: Sequence[QARecord],
) -> CrossPlay:
    """Let every policy play every monitor on held-out stories; both players are left as they were.

    With P policies, M monitors and S held-out stories, P · S answers and P · M · S critiques are written.
    """
    values: list[list[float]] = []
    verdicts: list[list[float]] = []
    accuracy: list[float] = []
    for policy in policies:
        with playing(pipeline.players.policy, policy) as player:
            answers = greedy_answers(pipeline, records, player)
        labels = [answer.correct for answer in answers]
        accuracy.append(rate(labels))
        values.append([])
        verdicts.append([])
        for monitor in monitors:
            with playing(pipeline.players.monitor, monitor):
                played = greedy_exchanges(pipeline, records, answers)
            values[-1].append(float(played.combined.mean()))
            verdicts[-1].append(verdict_accuracy(played.critiques, labels))
    return CrossPlay([m.step for m in policies], [m.step for m in monitors], values, verdicts, accuracy)
