"""All models of a game in one module that several processes hold in parts: FSDP2, or DeepSpeed's ZeRO.

The players' backbone, their critics, references, reward models and judges are sharded together and stepped by
one optimizer, whose groups belong to one player each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf_algos import (
    Lockstep,
    OptimizerConfig,
    Parallel,
    TrainedModule,
    create_optimizer,
    generate_together,
    in_batches,
    set_local_part,
)
from rlhf_algos.engine.optimizer import OPTIMIZERS
from rlhf_algos.parallel.sharding import reshard
from rlhf_algos.process_group import init_process_group, is_main_process
from rlhf_infer import Rollout, SamplingParams, TransformersEngine
from rlhf_minmax.config.run import MinMaxConfig, PlayerConfig
from rlhf_minmax.players.players import PLAIN, Players
from rlhf_minmax.players.snapshots import copies
from rlhf_models import PolicyModel, ShardUnit, ValueHead, check_packing, is_deferred, outlines

Outputs = dict[str, Tensor]


class ModelUnit(ShardUnit, nn.Module):
    """One model; what it has beside its layers is gathered while a function runs that uses it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Outputs]) -> Outputs:
        """The result of a function; tensors are in a dict, where hooks look for them."""
        return function()


class GameModels(ShardUnit, nn.Module):
    """Every model of a game once.

    Args:
        players: who is trained; several may be adapters of one model.
        critics: by role, of the players that have one.
        scorers: models of reward models and judges that are on no player's backbone: units of their own, or
            transformers models.
        heads: of the scorers that are on a player's backbone.
    """

    def __init__(
        self,
        players: Mapping[str, PolicyModel],
        critics: Mapping[str, ValueHead],
        scorers: Sequence[nn.Module],
        heads: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        models = [model for player in players.values() for model in (player.model, *player.references)]
        own = dict.fromkeys([*models, *scorers])
        units = [each if getattr(each, "shard_unit", False) else ModelUnit(each) for each in own]
        self.units = nn.ModuleList(units)
        self.critics = nn.ModuleDict(critics)
        self.heads = nn.ModuleList(heads)

    def forward(self, number: int, function: Callable[[], Outputs]) -> Outputs:
        """The result of a function that uses unit `number`."""
        return self.units[number](function)

    def number_of(self, model: nn.Module) -> int:
        """The unit of a model.

        Raises:
            KeyError: it has none.
        """
        for number, unit in enumerate(self.units):
            if unit is model or getattr(unit, "model", None) is model:
                return number
        raise KeyError(f"a {type(model).__name__} is not a model of the game")


class ShardedGame(TrainedModule):
    """The models of a game, sharded, with the optimizer of all players.

    Args:
        players: the players, deferred or not.
        scorers: see `GameModels`.
        heads: see `GameModels`.
        config: the run's settings.

    Attributes:
        critics: by role, of the players that have one.
    """

    def __init__(
        self,
        players: Players,
        scorers: Sequence[nn.Module],
        heads: Sequence[nn.Module],
        config: MinMaxConfig,
    ) -> None:
        self.players = {"policy": players.policy, "monitor": players.monitor}
        self.settings: dict[str, PlayerConfig] = {
            "policy": config.policy_model,
            "monitor": config.monitor_model,
        }
        if players.plain is not None:
            self.players[PLAIN], self.settings[PLAIN] = players.plain, config.policy_model
        self.critics = {
            role: new_critic(player, config.seed)
            for role, player in self.players.items()
            if self.settings[role].baseline == "critic"
        }
        self.steps = dict.fromkeys(self.players, 0)
        self._trained: dict[str, list[nn.Parameter]] = {}
        self._stepping: str | None = None
        self._hidden: list[tuple[Tensor, Tensor]] = []
        models = GameModels(self.players, self.critics, scorers, heads)
        deferred = is_deferred(models)
        device = init_process_group().device if deferred else players.policy.device
        parallel = Parallel(
            config.training.hardware(),
            device=device,
            dtype=torch.float32,
            max_grad_norm=config.training.max_grad_norm,
        )
        super().__init__(models, parallel, OptimizerConfig(), total_steps=1)
        self.models = models
        self.prepare()
        self._new_critics = {role: copies(list(each.parameters())) for role, each in self.critics.items()}
        if deferred:
            self._check_packing()

    def create_optimizer(self) -> tuple[Any, Any]:
        """AdamW with groups of parameters that know their player, and a schedule that changes nothing."""
        groups: list[dict[str, Any]] = []
        for role, settings in self.settings.items():
            player, critic = self.players[role], self.critics.get(role)
            if player.adapters is not None:
                player.adapters.list_parameters()  # sharding has replaced them
            self._trained[role] = [*player.parameters(), *(critic.parameters() if critic else ())]
            own = create_optimizer(
                self._trained[role],
                learning_rate=1.0,  # set before every step
                betas=settings.adam_betas,
                weight_decay=settings.weight_decay,
            )
            groups += [{**group, "role": role} for group in own.param_groups]
        optimizer = OPTIMIZERS["adamw_torch"](groups)
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizer.register_step_pre_hook(lambda *_: self._hide_others(optimizer))
        optimizer.register_step_post_hook(lambda *_: self._show_others())
        return optimizer, LambdaLR(optimizer, lambda _: 1.0)

    def role_of(self, player: PolicyModel) -> str:
        """The role of a player."""
        return next(role for role, each in self.players.items() if each is player)

    def run(self, model: nn.Module, function: Callable[[], Outputs]) -> Outputs:
        """The result of a function that makes one forward pass of a model; all processes must call it."""
        return self(self.models.number_of(model), function)

    def generate(
        self,
        engine: TransformersEngine,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        size: int | None,
    ) -> list[list[Rollout]]:
        """Completions by the active player of an engine's model; every process must call it.

        At most `size` prompts are sampled together; None: all.
        """

        def sample() -> list[list[Rollout]]:
            return in_batches(engine, prompts, n, params, size)

        if not self.parallel.shards_weights:
            return sample()
        unit: Any = self.models.units[self.models.number_of(engine.model)]
        return generate_together(
            self.parallel, engine, lambda run: self.models.call(lambda: unit.call(run)), sample
        )

    def score(
        self, model: nn.Module, announced: nn.Module, score: Callable[[], Tensor], idle: Callable[[], object]
    ) -> Tensor:
        """The result of a function that makes any number of passes; every process must call it.

        Args:
            model: the model that makes them.
            announced: the module that is called once for each.
            score: makes the passes.
            idle: makes one that does not count.
        """
        if not self.parallel.shards_weights:
            return score()
        lockstep = Lockstep(self.parallel)

        def counted() -> Tensor:
            with lockstep.announcing(announced):
                return score()

        def run() -> Tensor:
            return lockstep.run(counted, idle)

        unit: Any = self.models.units[self.models.number_of(model)]
        if unit is announced:  # gathers at every call
            return self.models.call(run)
        return self.models.call(lambda: unit.call(run))

    def begin(self, role: str) -> None:
        """Start the training of a player as it is now, with a new critic and no moments."""
        if role in self.critics:
            reshard(self.module)
            pairs = zip(self.critics[role].parameters(), self._new_critics[role], strict=True)
            for parameter, value in pairs:
                set_local_part(parameter, value)
        self.forget(role)

    def forget(self, role: str) -> None:
        """Start from weights that were written into the models, without a player's moments."""
        if self.parallel.deepspeed:
            self._deepspeed.refresh_fp32_params()
        for key, owner in self._state_keys():
            if owner == role:
                self.optimizer.state.pop(key, None)
        self.steps[role] = 0

    def set_learning_rate(self, role: str, rate: float) -> None:
        """The rate of a player's next steps."""
        for group in self.optimizer.param_groups:
            if group["role"] == role:
                group["lr"] = rate

    def clip(self, role: str) -> Tensor | None:
        """See `Parallel.clip`."""
        return self.parallel.clip(self._trained[role])

    def step_player(self, role: str) -> Tensor | None:
        """One step of a player; the norm of its gradient where `clip` does not give it."""
        self._stepping = role
        try:
            _, norm = self.step()
        finally:
            self._stepping = None
        if self.parallel.shards_weights and self.parallel.deepspeed:
            self._deepspeed.grad_partitions_flat_buffer.zero_()  # else the next player's norm counts them
        self.steps[role] += 1
        return norm

    def state(self) -> dict[str, Any]:
        """See `TrainedModule.state`; and how many steps each player has made."""
        return super().state() | {"steps": self.steps}

    def save(self, folder: Path) -> None:
        """See `TrainedModule.save`; players that made no step yet get moments of 0.

        DeepSpeed's converter takes no state without moments.
        """
        for key, _ in self._state_keys() if self.parallel.deepspeed else ():
            if key not in self.optimizer.state:
                moments = {name: torch.zeros_like(key) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[key] = {"step": torch.zeros((), device=key.device), **moments}
        super().save(folder)

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """See `TrainedModule.load`."""
        reshard(self.module)
        super().load(folder, state)
        self.steps = dict(state["steps"])
        for group, own in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(own)  # DeepSpeed's converter gives all groups the settings and steps of the first
        for key, role in self._state_keys():
            kept = self.optimizer.state.get(key, {})
            if "step" in kept:
                kept["step"] = torch.full_like(torch.as_tensor(kept["step"]), self.steps[role])

    @property
    def _deepspeed(self) -> Any:
        """DeepSpeed's optimizer."""
        return self.parallel.module.optimizer

    def _state_keys(self) -> list[tuple[Any, str]]:
        """The tensors that the optimizer keeps moments of, and the role of each."""
        if not self.parallel.deepspeed:
            return [(each, role) for role in self.players for each in self._trained[role]]
        roles = [group["role"] for group in self._groups]
        own = self._deepspeed
        if not self.parallel.shards_weights:
            return list(zip(own.single_partition_of_fp32_groups, roles, strict=True))
        flat = own.fp32_partitioned_groups_flat
        return [(each, roles[own.sub_group_to_group_id[number]]) for number, each in enumerate(flat)]

    def _hide_others(self, optimizer: Any) -> None:
        """Hide the gradients of players that do not step, so that the optimizer skips them."""
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["role"] != self._stepping else ():
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _show_others(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def _check_packing(self) -> None:
        for unit in self.models.units:
            model: Any = unit
            self.models.call(lambda unit=model: unit.call(lambda: check_packing(unit.model)))


@contextmanager
def saving(shared: ShardedGame | None, player: PolicyModel, *, outlined: bool = False) -> Iterator[bool]:
    """Within this context the process that writes can save a player; every process must enter it.

    Args:
        shared: the models of the game, where they are sharded.
        player: whose model is saved.
        outlined: leave out the weights of one trained in full, for `export_checkpoint` to add them.

    Yields:
        Whether this process writes.
    """
    if shared is None:
        yield is_main_process()
        return
    kept = outlines(shared.models) if outlined else nullcontext()
    with shared.parallel.gathering(player.model) as writes, kept:
        yield writes
    shared.parallel.wait()


def new_critic(player: PolicyModel, seed: int) -> ValueHead:
    """A value head for a player's hidden states."""
    device = torch.device("cpu") if is_deferred(player.model) else player.device
    return ValueHead(player.model.config.get_text_config().hidden_size, seed=seed).to(device)
