"""Players whose completions are sampled by workers on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

import torch

from rlhf_algos import Controller, EngineSetup, SharedController, WorkerRole, told_to
from rlhf_algos.process_group import world_size
from rlhf_data import RunFolder
from rlhf_infer import Rollout, SamplingParams
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.players.players import PLAIN, Players
from rlhf_models import PolicyModel


class GameWorkers:
    """Workers that hold all players; whichever is free samples for any of them.

    Weights travel for each player alone, whenever its trained parameters are no longer those that the workers
    have; a past player in a player's place is other weights of it.  With several training processes the first
    drives the workers, and all get every completion.

    Args:
        players: the players.
        config: the run's settings, with `distributed`.
        run: whose `workers.jsonl` says what happens to workers.

    Raises:
        UserError: Ray is missing, no cluster answers, or it has no room for the workers.
    """

    def __init__(self, players: Players, config: MinMaxConfig, run: RunFolder) -> None:
        assert config.distributed is not None
        named = {"policy": players.policy, "monitor": players.monitor, PLAIN: players.plain}
        self._names = {id(player): name for name, player in named.items() if player is not None}
        make = partial(
            Controller,
            config.distributed,
            EngineSetup(config.training.max_kv_tokens, torch.get_num_threads()),
            {name: _role(player) for name, player in named.items() if player is not None},
            eos_token_ids=[],
            prompts_per_batch=config.training.prompts_per_batch,
            tell=told_to(run),
        )
        self._controller = make() if world_size() == 1 else SharedController(make)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self, player: PolicyModel, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams
    ) -> list[list[Rollout]]:
        """`n` completions of each prompt by a player as it is now; the same call in every process."""
        return self._controller.sample_as(self._names[id(player)], prompts, n, params)

    def close(self) -> None:
        """End the workers, the connection, and a local cluster."""
        self._controller.close()


def _role(player: PolicyModel) -> WorkerRole:
    own = set(map(id, player.parameters()))
    trained = frozenset(name for name, each in player.model.named_parameters() if id(each) in own)
    return WorkerRole(player.model, player.tokenizer, player.adapter, trained)
