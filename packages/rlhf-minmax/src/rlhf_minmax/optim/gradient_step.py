"""How the gradients of all processes become one step: replicated optimizers, or DeepSpeed's sharded ones."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_algos import HardwareConfig, Parallel, create_optimizer, load_optimizer_state, save_optimizer_state
from rlhf_algos.process_group import all_reduce_gradients, is_main_process
from rlhf_data import PackedBatch, UserError
from rlhf_minmax.config.run import StepRule
from rlhf_minmax.optim.extragradient import GameStep
from rlhf_models import PolicyModel, TokenLogps, ValueHead, hidden_states, score_hidden

_ZERO_TAG = "state"
SHARDED_WEIGHTS = 3
"""The stage of ZeRO from which weights are sharded too."""

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
    """Takes a player's gradients, in several processes those of all, and steps its parameters.

    Attributes:
        scorer: the module whose parameters are trained.
        trained: what is stepped.
        optimizer: AdamW.
        lock_step: whether every process must make as many passes as the others.
        can_drop: whether gradients can be dropped before they became a step.
    """

    scorer: PlayerScorer
    trained: list[Any]
    optimizer: Any
    lock_step = False
    can_drop = True

    def train(self, mode: bool) -> None:
        """Put the trained module into train mode or eval mode."""
        self.scorer.train(mode)

    def scores(self, batch: PackedBatch) -> Scores:
        """What `PlayerScorer` gives, of the trained weights."""
        return self.scorer(batch)

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a part of this process's share of the loss; the shares add up to the loss."""

    def sum_gradients(self) -> None:
        """Put in the place of every gradient its sum over the processes, where `backward` does not do it."""
        return

    def clip(self) -> Tensor | None:
        """Clip the gradients; their norm before, None where `step` gives it."""
        return None

    @abstractmethod
    def step(self) -> Tensor | None:
        """One step; see `GameStep`. The norm of the gradient where `clip` does not give it."""

    def set_learning_rate(self, rate: float) -> None:
        """The rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def drop(self) -> None:
        """Forget the gradients; where they cannot be dropped, there are none yet."""
        self.optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def weights_replaced(self) -> None:
        """Take up weights that were written into the player, and forget what belongs to the old ones."""

    def state(self) -> dict[str, Tensor]:
        """What the rule of steps remembers, for a checkpoint; plain steps remember nothing."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        del state

    @abstractmethod
    def save(self, folder: Path, role: str) -> None:
        """Write the optimizer's state into a folder; every process must call it."""

    @abstractmethod
    def load(self, folder: Path, role: str) -> None:
        """Take up what `save` wrote; the player's weights are the checkpoint's already."""


class ReplicatedStepper(Stepper):
    """Every process has the whole optimizer and makes the same step with the sum of all gradients.

    Args:
        scorer: the player with its critic.
        trained: its parameters.
        settings: of AdamW, as `create_optimizer` takes them.
        rule: how a gradient becomes a step.
        max_grad_norm: 2-norm that gradients are scaled down to.
    """

    def __init__(
        self,
        scorer: PlayerScorer,
        trained: Sequence[nn.Parameter],
        settings: Mapping[str, Any],
        *,
        rule: StepRule,
        max_grad_norm: float,
    ) -> None:
        self.scorer, self.trained, self.max_grad_norm = scorer, list(trained), max_grad_norm
        self.optimizer = create_optimizer(self.trained, **settings)
        self.game_step = GameStep(self.trained, self.optimizer, rule)

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
        self.game_step()

    def weights_replaced(self) -> None:
        """See `Stepper`."""
        self.optimizer.state.clear()
        self.game_step.load_state({})

    def state(self) -> dict[str, Tensor]:
        """See `Stepper`."""
        return self.game_step.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Stepper`."""
        self.game_step.load_state(state)

    def save(self, folder: Path, role: str) -> None:
        """See `Stepper`."""
        if is_main_process():
            save_optimizer_state(self.optimizer, folder / f"{role}_optimizer.safetensors")

    def load(self, folder: Path, role: str) -> None:
        """See `Stepper`."""
        load_optimizer_state(self.optimizer, folder / f"{role}_optimizer.safetensors")


class ZeroStepper(Stepper):
    """DeepSpeed shards optimizer state and gradients over the processes (ZeRO, arXiv:1910.02054).

    With stage 3 the trained weights are sharded too: they are a copy of the player's model, which goes on
    sampling and scoring whole, and takes the trained weights after every step.

    Args:
        player: who is trained, in full for stage 3.
        critic: its critic, if any.
        temperature: see `PlayerScorer`.
        path: the DeepSpeed file.
        settings: of AdamW, as `create_optimizer` takes them.
        max_grad_norm: 2-norm that gradients are scaled down to.

    Raises:
        UserError: the file cannot be used.
    """

    lock_step, can_drop = True, False

    def __init__(
        self,
        player: PolicyModel,
        critic: ValueHead | None,
        temperature: float,
        path: str,
        settings: Mapping[str, Any],
        *,
        max_grad_norm: float,
    ) -> None:
        self.player, self.sharded = player, zero_stage(path) == SHARDED_WEIGHTS
        source = player
        if self.sharded:
            source = PolicyModel(copy.deepcopy(player.model), player.tokenizer)
        self.source = source
        self.scorer = PlayerScorer(source, critic, temperature)
        self.trained = [*source.parameters(), *(critic.parameters() if critic else ())]
        self.parallel = Parallel(
            HardwareConfig(deepspeed=path, bf16=False, fp16=False),
            device=player.device,
            dtype=torch.float32,
            max_grad_norm=max_grad_norm,
        )
        self.optimizer = create_optimizer(self.trained, **settings)
        self.engine, self._prepared = self.parallel.prepare(self.scorer, self.optimizer)

    def train(self, mode: bool) -> None:
        """See `Stepper`."""
        self.engine.train(mode)

    def scores(self, batch: PackedBatch) -> Scores:
        """See `Stepper`."""
        return self.engine(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Stepper`."""
        self.parallel.backward(loss, last=last)

    def step(self) -> Tensor | None:
        """See `Stepper`."""
        _, norm = self.parallel.step(self._prepared)
        self._hand_over()
        return norm

    def weights_replaced(self) -> None:
        """See `Stepper`."""
        if self.sharded:
            raise AssertionError("MinMaxConfig refuses rollbacks with sharded weights")
        self.engine.optimizer.refresh_fp32_params()
        self.optimizer.state.clear()

    def save(self, folder: Path, role: str) -> None:
        """See `Stepper`."""
        self.engine.save_checkpoint(
            str(folder / f"{role}_deepspeed"), tag=_ZERO_TAG, exclude_frozen_parameters=True
        )

    def load(self, folder: Path, role: str) -> None:
        """See `Stepper`."""
        place, _ = self.engine.load_checkpoint(
            str(folder / f"{role}_deepspeed"), tag=_ZERO_TAG, load_module_strict=False
        )
        if place is None:
            raise UserError(
                f"{folder} holds no DeepSpeed state of the {role}; resume as the run was started",
                code="different_training_data",
            )

    @torch.no_grad()
    def _hand_over(self) -> None:
        """Give the trained weights to the player, where they are not its own, a whole parameter at a time."""
        if not self.sharded:
            return
        for own, trained in zip(self.player.parameters(), self.source.parameters(), strict=True):
            with self.parallel.whole_parameters([trained]):
                own.copy_(trained)


def zero_stage(path: str) -> int:
    """The stage that a DeepSpeed file names.

    Raises:
        UserError: the file cannot be read, or names none.
    """
    try:
        stage = json.loads(Path(path).read_text(encoding="utf-8"))["zero_optimization"]["stage"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"deepspeed file {path} gives no zero_optimization.stage ({error!r}); the repository's configs/ "
            "has files that do"
        ) from error
    return int(stage)
