"""Scoring in several processes: each scores its part, or the first asks an API for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_algos.process_group import all_gather, broadcast, is_main_process, shard, world_size
from rlhf_data import TokenSequence, pack
from rlhf_infer import PromptedJudge
from rlhf_minmax.config.scorers import JudgeConfig
from rlhf_minmax.game.validator import Validator
from rlhf_minmax.players.sharded import ShardedGame
from rlhf_minmax.scorers.chat_reward import ChatReward
from rlhf_minmax.scorers.loading import HeadJudge, HeldOut
from rlhf_minmax.scorers.shared_trunk import SharedScorer
from rlhf_models import ScalarModel, causal_lm, head_of, token_logps


class ScoredInParts:
    """A reward model or judge whose work is split: every process scores a part, and gets all scores.

    The scorer has `score(*columns, **options)`, columns being equally long; the same on every process.
    """

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer

    def score(self, *columns: Sequence[Any], **options: Any) -> Tensor:
        """(B,) the scorer's scores of B rows; every process must call it with the same."""
        own = [shard(column) for column in columns]
        scores = self._own(own, options).tolist()
        return torch.tensor(all_gather(scores))

    def _own(self, columns: Sequence[Sequence[Any]], options: dict[str, Any]) -> Tensor:
        return self.scorer.score(*columns, **options) if columns[0] else torch.zeros(0)


class ShardedScorer(ScoredInParts):
    """A scorer whose model is sharded, so that every process takes part in the passes of the others.

    Args:
        scorer: see `ScoredInParts`.
        model: what `model_of` found in it.
        shared: the models of the game.
    """

    def __init__(
        self, scorer: Any, model: ScalarModel | SharedScorer | PromptedJudge, shared: ShardedGame
    ) -> None:
        super().__init__(scorer)
        self.model, self.shared = model, shared

    def _own(self, columns: Sequence[Sequence[Any]], options: dict[str, Any]) -> Tensor:
        model = self.model
        passes: Any = model.model if isinstance(model, SharedScorer) else model
        unit: Any = model
        if isinstance(model, SharedScorer):
            unit = model.adapters.model
        elif isinstance(model, PromptedJudge):
            unit, passes = model.model, causal_lm(model.model).base_model
        return self.shared.score(
            unit, passes, lambda: super(ShardedScorer, self)._own(columns, options), self._idle
        )

    @torch.no_grad()
    def _idle(self) -> None:
        """A pass that does not count."""
        (batch,) = pack([TokenSequence([0, 0], 1)])
        batch = batch.to(self.shared.parallel.device)
        if isinstance(self.model, SharedScorer):
            with self.model.adapters.use(self.model.adapter):
                self.model.model(batch)
        elif isinstance(self.model, PromptedJudge):
            token_logps(self.model.model, batch)
        else:
            self.model(batch)


class ScoredByFirst:
    """A judge behind an API, which the first process asks for all, so that its limits are kept."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer

    def score(self, *columns: Sequence[Any], **options: Any) -> Tensor:
        """(B,) the scorer's scores of B rows; every process must call it."""
        scores = self.scorer.score(*columns, **options).tolist() if is_main_process() else None
        return torch.tensor(broadcast(scores))


def model_of(scorer: object) -> ScalarModel | SharedScorer | PromptedJudge | None:
    """The object that runs a scorer's model on this machine; None for a scorer without one."""
    while isinstance(scorer, ChatReward | HeadJudge):
        scorer = scorer.model
    return scorer if isinstance(scorer, ScalarModel | SharedScorer | PromptedJudge) else None


def sharded_modules(scorers: Sequence[object]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The models of scorers that have their own, and the heads of those on a player's backbone."""
    found = [model for scorer in scorers if (model := model_of(scorer)) is not None]
    heads: list[nn.Module] = [head_of(each.model.model) for each in found if isinstance(each, SharedScorer)]
    models: list[nn.Module] = [
        each.model if isinstance(each, PromptedJudge) else each
        for each in found
        if not isinstance(each, SharedScorer)
    ]
    return models, heads


def shared_out(scorer: Any, config: JudgeConfig | None = None, shared: ShardedGame | None = None) -> Any:
    """A scorer as all processes use it together; in a single process as it is.

    Args:
        scorer: a reward model or a judge.
        config: the judge's; None for a reward model.
        shared: the models of a game that is sharded, the scorer's among them.
    """
    if shared is not None and (model := model_of(scorer)) is not None:
        return ShardedScorer(scorer, model, shared)
    if world_size() == 1 or isinstance(scorer, Validator):
        return scorer
    return ScoredByFirst(scorer) if config and config.kind == "api" else ScoredInParts(scorer)


def held_out_together(
    held_out: HeldOut, config: JudgeConfig | None, shared: ShardedGame | None = None
) -> HeldOut:
    """Held-out scorers as all processes use them together; `config` is the judge's."""
    reward, judge = held_out.reward_model, held_out.judge
    return HeldOut(
        None if reward is None else shared_out(reward, None, shared),
        None if judge is None else shared_out(judge, config, shared),
        held_out.reward_scale,
        held_out.judge_scale,
    )
