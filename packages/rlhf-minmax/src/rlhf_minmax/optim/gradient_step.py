"""Optimizer steps from the gradients of all processes: with replicated players, or with sharded ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_algos import create_optimizer, load_optimizer_state, save_optimizer_state
from rlhf_algos.process_group import all_reduce_gradients, is_main_process
from rlhf_data import PackedBatch
from rlhf_minmax.players.sharded import ShardedGame
from rlhf_models import PolicyModel, TokenLogps, ValueHead, hidden_states, score_hidden

Scores = tuple[TokenLogps, Tensor | None]


class PlayerScorer(nn.Module):
    """A player with its critic, if any, as one module: the trunk runs once for log-probs and values.

    Args:
        player: whose log-probs.
        critic: gives values; None for none.
        temperature: at which log-probs and entropies are taken.
    """

    def __init__(self, player: PolicyModel, critic: ValueHead | None, temperature: float) -> None:
        super().__init__()
        self.player, self.critic, self.temperature = player, critic, temperature

    def forward(self, batch: PackedBatch) -> Scores:
        """Log-probs with entropies, and values (M,) or None; the player is the active one."""
        options = {"temperature": self.temperature, "with_entropy": True}
        if self.critic is None:
            return self.player.logps(batch, **options), None
        with self.player.active() as model:
            hidden = hidden_states(model, batch)
            return score_hidden(model, hidden, batch, **options), self.critic(hidden[batch.score_positions])


class Stepper(ABC):
    """Sums a player's gradients over all processes, and steps its parameters.

    Attributes:
        scorer: the module whose parameters are trained.
        optimizer: AdamW.
        lock_step: whether every process must make as many passes as the others.
        can_drop: whether gradients can be dropped instead of being applied.
    """

    scorer: PlayerScorer
    optimizer: Any
    lock_step = False
    can_drop = True

    def train(self, mode: bool) -> None:
        """Put the trained module into train mode or eval mode."""
        self.scorer.train(mode)

    def scores(self, batch: PackedBatch) -> Scores:
        """Outputs of `PlayerScorer` for the trained weights."""
        return self.scorer(batch)

    def ref_logps(self, batch: PackedBatch) -> Tensor:
        """Log-probs (M,) of the player's reference, without gradients."""
        return self.scorer.player.ref_logps(batch, temperature=self.scorer.temperature)

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a part of this process's share of the loss; the shares add up to the loss."""

    def sum_gradients(self) -> None:
        """Replace every gradient by its sum over the processes, where `backward` does not do it."""
        return

    def clip(self) -> Tensor | None:
        """Clip the gradients; their norm before, None if `step` gives it."""
        return None

    @abstractmethod
    def step(self) -> Tensor | None:
        """Step the optimizer; the norm of the gradient where `clip` does not give it."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def drop(self) -> None:
        """Forget the gradients; where they cannot be dropped, there are none yet."""
        self.optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def weights_replaced(self) -> None:
        """Start from weights that were written into the player, without the moments of the old ones."""

    def save(self, folder: Path, role: str) -> None:
        """Write the optimizer's state into a folder, where the players do not share it."""
        return

    def load(self, folder: Path, role: str) -> None:
        """Restore the state that `save` wrote; the player's weights are the checkpoint's already."""
        return


class ReplicatedStepper(Stepper):
    """Every process has the whole optimizer and makes the same step with the sum of all gradients.

    Args:
        scorer: the player with its critic.
        trained: its parameters.
        settings: of AdamW, as `create_optimizer` takes them.
        max_grad_norm: 2-norm that gradients are scaled down to.
    """

    def __init__(
        self,
        scorer: PlayerScorer,
        trained: Sequence[nn.Parameter],
        settings: Mapping[str, Any],
        *,
        max_grad_norm: float,
    ) -> None:
        self.scorer, self.trained, self.max_grad_norm = scorer, list(trained), max_grad_norm
        self.optimizer = create_optimizer(self.trained, **settings)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Stepper`."""
        del last
        loss.backward()

    def sum_gradients(self) -> None:
        """See `Stepper`."""
        all_reduce_gradients(self.trained)

    def clip(self) -> Tensor:
        """See `Stepper`."""
        return torch.nn.utils.clip_grad_norm_(self.trained, self.max_grad_norm)

    def step(self) -> None:
        """See `Stepper`."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def weights_replaced(self) -> None:
        """See `Stepper`."""
        self.optimizer.state.clear()

    def save(self, folder: Path, role: str) -> None:
        """See `Stepper`."""
        if is_main_process():
            save_optimizer_state(self.optimizer, folder / f"{role}_optimizer.safetensors")

    def load(self, folder: Path, role: str) -> None:
        """See `Stepper`."""
        load_optimizer_state(self.optimizer, folder / f"{role}_optimizer.safetensors")


class ShardedStepper(Stepper):
    """Steps of one player of a game whose models are sharded; see `ShardedGame`.

    Args:
        scorer: the player with its critic.
        shared: the models of the game.
        role: the player's.
    """

    lock_step = True

    def __init__(self, scorer: PlayerScorer, shared: ShardedGame, role: str) -> None:
        self.scorer, self.shared, self.role = scorer, shared, role
        self.optimizer = shared.optimizer
        self.can_drop = not shared.parallel.deepspeed
        shared.begin(role)

    def scores(self, batch: PackedBatch) -> Scores:
        """See `Stepper`."""

        def run() -> dict[str, Tensor]:
            found, values = self.scorer(batch)
            assert found.entropy is not None
            outputs = {"logps": found.logps, "entropy": found.entropy}
            return outputs if values is None else outputs | {"values": values}

        outputs = self.shared.run(self.scorer.player.model, run)
        return TokenLogps(outputs["logps"], outputs["entropy"]), outputs.get("values")

    def ref_logps(self, batch: PackedBatch) -> Tensor:
        """See `Stepper`."""
        player = self.scorer.player
        model = player.references[0] if player.references else player.model
        with torch.no_grad():
            return self.shared.run(model, lambda: {"logps": super(ShardedStepper, self).ref_logps(batch)})[
                "logps"
            ]

    def set_learning_rate(self, rate: float) -> None:
        """See `Stepper`."""
        self.shared.set_learning_rate(self.role, rate)

    def drop(self) -> None:
        """See `Stepper`."""
        if self.can_drop:
            super().drop()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Stepper`."""
        with self.shared.parallel.accumulating(last=last):
            self.shared.parallel.backward(loss, last=last)

    def clip(self) -> Tensor | None:
        """See `Stepper`."""
        return self.shared.clip(self.role)

    def step(self) -> Tensor | None:
        """See `Stepper`."""
        return self.shared.step_player(self.role)

    def weights_replaced(self) -> None:
        """See `Stepper`."""
        self.shared.forget(self.role)
