"""A trained module with its wrapper, optimizer and schedule, and their checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_algos.checkpoints.deepspeed_state import load_deepspeed_state, save_deepspeed_state
from rlhf_algos.checkpoints.export import DEEPSPEED, SHARDED
from rlhf_algos.checkpoints.manager import (
    load_optimizer_state,
    load_rng_state,
    save_optimizer_state,
    save_rng_state,
)
from rlhf_algos.checkpoints.sharded_state import load_sharded_state, save_sharded_state
from rlhf_algos.configs.trainer import OptimizerConfig
from rlhf_algos.engine.optimizer import create_optimizer, create_scheduler
from rlhf_algos.parallel.parallel import Parallel
from rlhf_algos.parallel.sharding import reshard

_OPTIMIZER = "optimizer.safetensors"
_RNG = "rng_state.safetensors"


class TrainedModule:
    """A module with its optimizer and schedule, wrapped as the processes and the precision need it.

    Resumed on the same number of processes, training continues as if never stopped (to the bit on CPU); the
    module's weights are saved and loaded by the trainer, which knows their format.

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
        parallel.shard(module)
        self.optimizer, self.scheduler = self.create_optimizer()
        self.prepared = False
        self._wrapped: Any = module
        self._stepped: Any = self.optimizer
        self._saved: tuple[Path, dict[str, Any]] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def prepare(self) -> None:
        """Move and wrap the module as the settings say; called on first use."""
        if self.prepared:
            return
        self._wrapped, self._stepped = self.parallel.prepare(self.module, self.optimizer)
        self.prepared = True
        self._restore()

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module, wrapped for the processes and the precision of this training."""
        self.prepare()
        with self.parallel.offloading():
            return self._wrapped(*inputs, **options)

    def step(self) -> tuple[bool, Tensor | None]:
        """One optimizer step; see `Parallel.step`."""
        return self.parallel.step(self._stepped)

    def state(self) -> dict[str, Any]:
        """State for checkpoints besides the files, as JSON values."""
        return {"scheduler": self.scheduler.state_dict(), "loss_scaler": self.parallel.scaler_state()}

    def save(self, folder: Path) -> None:
        """Write the optimizer's state and this process's random state; every process must call it."""
        if self.parallel.deepspeed:
            save_deepspeed_state(self._wrapped, folder / DEEPSPEED)
        elif self.parallel.fsdp:
            reshard(self.module)
            save_sharded_state(self.module, self.optimizer, folder / SHARDED)
        elif self.parallel.is_main:
            save_optimizer_state(self.optimizer, folder / _OPTIMIZER)
        save_rng_state(folder / self._rng_file())

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore what `save` wrote and `state` returned: now, or when the module is prepared."""
        self.parallel.load_scaler_state(state["loss_scaler"])
        self._saved = (folder, state["scheduler"])
        if self.prepared:
            self._restore()

    def _restore(self) -> None:
        """Restore optimizer, schedule and random state from a loaded checkpoint, once."""
        if self._saved is None:
            return
        (folder, schedule), self._saved = self._saved, None
        self.scheduler.load_state_dict(schedule)
        if self.parallel.deepspeed:
            load_deepspeed_state(self._wrapped, folder / DEEPSPEED)
        elif self.parallel.fsdp or holds_weights(folder):
            reshard(self.module)
            load_sharded_state(self.module, self.optimizer, folder / SHARDED)
        else:
            load_optimizer_state(self.optimizer, folder / _OPTIMIZER)
        self.set_learning_rates()
        own = folder / self._rng_file()
        load_rng_state(own if own.exists() else folder / _RNG)
        if not own.exists():  # there were fewer processes; theirs must differ
            torch.manual_seed(torch.initial_seed() + self.parallel.rank)

    def set_learning_rates(self) -> None:
        """Those of the schedule now: the optimizer remembers those of a shorter run that is extended."""
        rates = zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
        for group, (base, factor) in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = base * factor(self.scheduler.last_epoch)

    def scale_learning_rates(self, factor: float) -> None:
        """Multiply the learning rates of all steps to come by a factor."""
        self.scheduler.base_lrs = [rate * factor for rate in self.scheduler.base_lrs]
        self.set_learning_rates()

    def create_optimizer(self) -> tuple[Any, Any]:
        """The optimizer over the trained parameters, and its schedule; the module is sharded already."""
        config = self._config
        optimizer = create_optimizer(
            self.parameters,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=config.adam_epsilon,
            optim=config.optim,
            half=self.parallel.deepspeed,
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


def holds_weights(folder: str | Path) -> bool:
    """Whether a checkpoint has the trained weights beside the optimizer's state, as of a sharded module."""
    return (Path(folder) / SHARDED).is_dir()
