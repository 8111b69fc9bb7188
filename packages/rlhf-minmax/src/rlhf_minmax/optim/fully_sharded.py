"""Steps of a player whose trained weights are sharded over the processes (FSDP2)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from rlhf_algos import HardwareConfig, Parallel, create_optimizer, load_full_optimizer, save_full_optimizer
from rlhf_minmax.optim.gradient_step import PlayerScorer, Stepper
from rlhf_models import PolicyModel, ValueHead


class FSDPStepper(Stepper):
    """Each process holds a part of the trained weights, of their gradients and of AdamW's moments.

    The trained weights are a copy of the player's and its critic's, sharded by torch's `fully_shard`. The
    player goes on sampling and scoring whole, as a policy does in GRPO, and takes them after every step.
    Frozen weights, such as the backbone of adapters, are the player's own.

    Args:
        player: who is trained.
        critic: its critic, if any.
        temperature: see `PlayerScorer`.
        settings: of AdamW, as `create_optimizer` takes them.
        max_grad_norm: 2-norm that gradients are scaled down to.

    Raises:
        UserError: there is a single process.
    """

    lock_step = True

    def __init__(
        self,
        player: PolicyModel,
        critic: ValueHead | None,
        temperature: float,
        settings: Mapping[str, Any],
        *,
        max_grad_norm: float,
    ) -> None:
        whole = PlayerScorer(player, critic, temperature)
        self.whole = [*player.parameters(), *(critic.parameters() if critic else ())]
        trained = {id(parameter) for parameter in self.whole}
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        frozen = [parameter for parameter in whole.parameters() if id(parameter) not in trained]
        shared = (*frozen, player.tokenizer, *player.references)
        self.scorer = copy.deepcopy(whole, {id(each): each for each in shared})
        self.parallel = Parallel(
            HardwareConfig(fsdp=True, bf16=False, fp16=False),
            device=player.device,
            dtype=torch.float32,
            max_grad_norm=max_grad_norm,
        )
        self.parallel.shard(self.scorer, frozen=frozen)
        sharded = dict(self.scorer.named_parameters())
        self.trained = [sharded[names[id(parameter)]] for parameter in self.whole]
        self.optimizer = create_optimizer(self.trained, **settings)
        self.parallel.prepare(self.scorer, self.optimizer)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Stepper`."""
        with self.parallel.accumulating(last=last):
            self.parallel.backward(loss, last=last)

    def clip(self) -> Tensor | None:
        """See `Stepper`."""
        return self.parallel.clip(self.trained)

    @torch.no_grad()
    def step(self) -> None:
        """See `Stepper`; the player takes the trained weights, a whole parameter at a time."""
        self.parallel.step(self.optimizer)
        for own, trained in zip(self.whole, self.trained, strict=True):
            own.copy_(trained.full_tensor())

    @torch.no_grad()
    def weights_replaced(self) -> None:
        """See `Stepper`."""
        for own, trained in zip(self.whole, self.trained, strict=True):
            mesh, placements = trained.device_mesh, trained.placements
            trained.copy_(distribute_tensor(own.detach(), mesh, placements, src_data_rank=None))
        self.optimizer.state.clear()

    def save(self, folder: Path, role: str) -> None:
        """See `Stepper`; a player that made no step yet has no state."""
        if self.optimizer.state:
            path = folder / f"{role}_optimizer.safetensors"
            save_full_optimizer(self.scorer, self.optimizer, path, write=self.parallel.is_main)

    def load(self, folder: Path, role: str) -> None:
        """See `Stepper`."""
        self.weights_replaced()
        path = folder / f"{role}_optimizer.safetensors"
        if path.exists():
            load_full_optimizer(self.scorer, self.optimizer, path)
