"""A trained module with its optimizer and schedule, whatever wraps it, and how they are saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf_algos.checkpoints.manager import (
    load_optimizer_state,
    load_rng_state,
    save_optimizer_state,
    save_rng_state,
)
from rlhf_algos.configs.trainer import OptimizerConfig
from rlhf_algos.engine.optimizer import create_optimizer, create_scheduler
from rlhf_algos.engine.parallel import Parallel
from rlhf_data import UserError

__all__ = ["TrainedModule", "load_full_optimizer", "save_full_optimizer"]

_OPTIMIZER, _DEEPSPEED = "optimizer.safetensors", "deepspeed"
_RNG = "rng_state.safetensors"


class TrainedModule:
    """A module with its optimizer and schedule, wrapped as the processes and the precision need it.

    Resumed on the same number of processes, training goes on as if never stopped (to the bit on CPU); the
    module's weights are saved and loaded by whoever knows their format.

    Args:
        module: what is called and trained.
        parallel: the processes.
        config: settings of the optimizer.
        total_steps: of the training, for the schedule.

    Attributes:
        optimizer: AdamW over the trained parameters.
        scheduler: sets its learning rate.
        prepared: whether the module is wrapped.
    """

    def __init__(
        self, module: nn.Module, parallel: Parallel, config: OptimizerConfig, *, total_steps: int
    ) -> None:
        self.module, self.parallel = module, parallel
        self._config, self._total_steps = config, total_steps
        self.optimizer, self.scheduler = self._create_optimizer()
        self.prepared = False
        self._wrapped: Any = module
        self._stepped: Any = self.optimizer
        self._saved: tuple[Path, dict[str, Any]] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def prepare(self) -> None:
        """Move, shard and wrap the module as the settings say; the first use does it."""
        if self.prepared:
            return
        if self.parallel.shard(self.module):
            self.optimizer, self.scheduler = self._create_optimizer()
        self._wrapped, self._stepped = self.parallel.prepare(self.module, self.optimizer)
        self.prepared = True
        self._take_up()

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module, wrapped for the processes and the precision of this training."""
        self.prepare()
        return self._wrapped(*inputs, **options)

    def step(self) -> tuple[bool, Tensor | None]:
        """One optimizer step; see `Parallel.step`."""
        return self.parallel.step(self._stepped)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it besides files, as JSON values."""
        return {"scheduler": self.scheduler.state_dict(), "loss_scaler": self.parallel.scaler_state()}

    def save(self, folder: Path) -> None:
        """Write the optimizer's state and this process's random state; every process must call it."""
        if self.parallel.deepspeed:
            self._wrapped.save_checkpoint(
                str(folder / _DEEPSPEED), tag="state", exclude_frozen_parameters=True
            )
        elif self.parallel.fsdp:
            save_full_optimizer(self.module, self.optimizer, folder / _OPTIMIZER, write=self.parallel.is_main)
        elif self.parallel.is_main:
            save_optimizer_state(self.optimizer, folder / _OPTIMIZER)
        save_rng_state(folder / self._rng_file())

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Take up what `save` wrote and `state` gave: now, or when the module is prepared."""
        self.parallel.load_scaler_state(state["loss_scaler"])
        self._saved = (folder, state["scheduler"])
        if self.prepared:
            self._take_up()

    def _take_up(self) -> None:
        """Put optimizer, schedule and random state where a loaded checkpoint has them, once."""
        if self._saved is None:
            return
        (folder, schedule), self._saved = self._saved, None
        self.scheduler.load_state_dict(schedule)
        if self.parallel.deepspeed:
            place, _ = self._wrapped.load_checkpoint(
                str(folder / _DEEPSPEED),
                tag="state",
                load_module_strict=False,  # it holds no frozen weights
            )
            if place is None:
                raise UserError(
                    f"{folder} holds no DeepSpeed state; resume as the run was started",
                    code="different_training_data",
                )
        elif self.parallel.fsdp:
            load_full_optimizer(self.module, self.optimizer, folder / _OPTIMIZER)
        else:
            load_optimizer_state(self.optimizer, folder / _OPTIMIZER)
        self._set_learning_rates()
        own = folder / self._rng_file()
        load_rng_state(own if own.exists() else folder / _RNG)
        if not own.exists():  # there were fewer processes; theirs must differ
            torch.manual_seed(torch.initial_seed() + self.parallel.rank)

    def _set_learning_rates(self) -> None:
        """Those of the schedule now: the optimizer remembers those of a shorter run that is extended."""
        rates = zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
        for group, (base, factor) in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = base * factor(self.scheduler.last_epoch)

    def _create_optimizer(self) -> tuple[Any, Any]:
        config = self._config
        optimizer = create_optimizer(
            self.parameters,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=config.adam_epsilon,
            optim=config.optim,
        )
        scheduler = create_scheduler(
            optimizer,
            config.lr_scheduler_type,
            total_steps=self._total_steps,
            warmup_steps=config.warmup_steps,
        )
        return optimizer, scheduler

    def _rng_file(self) -> str:
        rank = self.parallel.rank
        return f"rng_state_{rank}.safetensors" if rank else _RNG


def save_full_optimizer(module: Any, optimizer: Any, path: Path, *, write: bool) -> None:
    """Gather a sharded optimizer's state and write it as one safetensors file; all processes must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_optimizer_state_dict(module, optimizer, options=options)
    if write:
        entries = ((name, *entry) for name, values in state["state"].items() for entry in values.items())
        tensors = {f"{name}|{key}": value.contiguous() for name, key, value in entries}
        save_file(tensors, str(path), metadata={"param_groups": json.dumps(state["param_groups"])})


def load_full_optimizer(module: Any, optimizer: Any, path: Path) -> None:
    """Spread a state that `save_full_optimizer` wrote over the processes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    state: dict[str, Any] = {}
    with safe_open(str(path), framework="pt") as file:
        keys: list[str] = file.keys()
        for key in keys:
            name, _, entry = key.rpartition("|")
            state.setdefault(name, {})[entry] = file.get_tensor(key)
        groups = json.loads(file.metadata()["param_groups"])
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(module, optimizer, {"state": state, "param_groups": groups}, options=options)
