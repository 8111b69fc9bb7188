"""Scoring in several processes: each scores its part, or the first asks an API for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_algos.process_group import (
    all_gather,
    broadcast,
    is_main_process,
    shard,
    world_size,
)
from rlhf_minmax.config.scorers import JudgeConfig
from rlhf_minmax.scorers.loading import HeldOut


class ScoredInParts:
    """A reward model or a judge of which every process scores a part, and gets all scores.

    Args:
        scorer: has `score(*columns, **options)`, columns being equally long; the same on every process.
    """

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer

    def score(self, *columns: Sequence[Any], **options: Any) -> Tensor:
        """(B,) the scorer's scores of B rows; every process must call it with the same."""
        own = [shard(column) for column in columns]
        scores = self.scorer.score(*own, **options).tolist() if own[0] else []
        return torch.tensor(all_gather(scores))


class ScoredByFirst:
    """A judge behind an API, which the first process asks for all, so that its limits are kept.

    Args:
        scorer: see `ScoredInParts`.
    """

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer

    def score(self, *columns: Sequence[Any], **options: Any) -> Tensor:
        """(B,) the scorer's scores of B rows; every process must call it."""
        scores = self.scorer.score(*columns, **options).tolist() if is_main_process() else None
        return torch.tensor(broadcast(scores))


def shared_out(scorer: Any, config: JudgeConfig | None = None) -> Any:
    """A scorer as all processes use it together; in a single process as it is.

    Args:
        scorer: a reward model or a judge.
        config: of a judge; None for a reward model.
    """
    if world_size() == 1:
        return scorer
    return ScoredByFirst(scorer) if config and config.kind == "api" else ScoredInParts(scorer)


def held_out_together(held_out: HeldOut, config: JudgeConfig | None) -> HeldOut:
    """Held-out scorers as all processes use them together; `config` is the judge's."""
    reward, judge = held_out.reward_model, held_out.judge
    return HeldOut(
        None if reward is None else shared_out(reward),
        None if judge is None else shared_out(judge, config),
        held_out.reward_scale,
        held_out.judge_scale,
    )
