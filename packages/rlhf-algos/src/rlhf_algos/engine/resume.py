"""Saving and resuming a trainer, whatever wraps its model."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf_algos.checkpoints.manager import (
    CheckpointManager,
    load_optimizer_state,
    load_rng_state,
    save_optimizer_state,
    save_rng_state,
)
from rlhf_algos.tracking.debug import nonfinite_message
from rlhf_algos.tracking.early_stopping import EarlyStopping
from rlhf_data import UserError

if TYPE_CHECKING:
    from rlhf_algos.engine.base_trainer import BaseTrainer

__all__ = ["TrainerState"]

_LOG = logging.getLogger(__name__)
_OPTIMIZER, _DEEPSPEED = "optimizer.safetensors", "deepspeed"


class TrainerState:
    """What a trainer's checkpoints hold, and how it comes back.

    Covered: weights, optimizer, schedule, fp16's loss scale, data position, random state of every process,
    the best metric and the method's own state; resumed on the same number of processes, training goes on as
    if never stopped (to the bit on CPU).

    Attributes:
        stopping: counts evaluations without an improvement.
        manager: the run folder's checkpoints, None without one.
    """

    def __init__(self, trainer: BaseTrainer[Any]) -> None:
        self._trainer = trainer
        self._pending: Path | None = None
        self._schedule: dict[str, Any] | None = None
        config, better = trainer.config, trainer.config.greater_is_better
        self.stopping = EarlyStopping(
            trainer.best_metric_name,
            config.early_stopping_patience,
            config.early_stopping_threshold,
            greater_is_better=better,
        )
        self.manager: CheckpointManager | None = None
        if trainer.run:
            self.manager = CheckpointManager(
                trainer.run,
                keep=config.save_total_limit,
                metric=trainer.best_metric_name,
                greater_is_better=better,
            )

    def save(self, metrics: Mapping[str, float]) -> None:
        """Write the checkpoint of the present step; every process must call it."""
        trainer, parallel = self._trainer, self._trainer.parallel
        trainer.prepare()
        manager, description = self._manager(), self._describe()
        with contextlib.ExitStack() as stack:
            folder = Path()
            if parallel.is_main:
                folder = stack.enter_context(manager.writing(trainer.step, description, metrics=metrics))
            if parallel.world_size > 1:
                folder = Path(_agreed(str(folder)))
            with parallel.whole(trainer.scorer):
                if parallel.is_main:
                    trainer.save_weights(folder)
            parallel.wait()  # a model may be saved by replacing the folder, with what else is in it
            self._save_own(folder)
            parallel.wait()
        parallel.wait()

    def resume(self) -> bool:
        """See `BaseTrainer.resume`."""
        manager, run = self._manager(), self._trainer.run
        latest = manager.latest()
        if latest is not None:
            self.load(latest)
        self._trainer.parallel.wait()
        if run is not None and self._trainer.parallel.is_main:
            run.truncate_logs(self._trainer.step)
        return latest is not None

    def load(self, folder: Path) -> None:
        """See `BaseTrainer.load_checkpoint`."""
        trainer = self._trainer
        state = CheckpointManager.read_state(folder)
        for key, (name, have) in self._identity().items():
            if state[key] != have:
                raise UserError(
                    f"{folder} was written with {state[key]} {name}, there are now {have}; "
                    "resume with the same"
                )
        if trainer.parallel.sharded and trainer._prepared is not None:
            raise ValueError("a sharded trainer takes up a checkpoint before its first step only")
        trainer.load_weights(folder)
        self._schedule = state["scheduler"]
        self.load_schedule()
        trainer.step, trainer.num_tokens = state["step"], state["num_tokens"]
        self.stopping.load_state(state["stopping"])
        trainer.load_extra_state(state["method"])
        trainer.parallel.load_scaler_state(state["loss_scaler"])
        self._pending = folder
        if trainer._prepared is not None:
            self.load_optimizer()

    def load_schedule(self) -> None:
        """Put the schedule where a loaded checkpoint has it."""
        if self._schedule is not None:
            self._trainer.scheduler.load_state_dict(self._schedule)

    def load_optimizer(self) -> None:
        """Put the optimizer and the random state where a loaded checkpoint has them, once."""
        folder, trainer = self._pending, self._trainer
        if folder is None:
            return
        self._pending = None
        if trainer.parallel.deepspeed:
            place, _ = trainer._prepared.load_checkpoint(
                str(folder / _DEEPSPEED),
                tag="state",
                load_module_strict=False,  # it holds no frozen weights
            )
            if place is None:
                raise UserError(f"{folder} holds no DeepSpeed state; resume as the run was started")
        elif trainer.parallel.fsdp:
            _load_full_optimizer(trainer.scorer, trainer.optimizer, folder / _OPTIMIZER)
        else:
            load_optimizer_state(trainer.optimizer, folder / _OPTIMIZER)
        self._set_learning_rates()
        load_rng_state(folder / self._rng_file())

    def _set_learning_rates(self) -> None:
        """Those of the schedule now: the optimizer remembers those of a shorter run that is extended."""
        scheduler = self._trainer.scheduler
        rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, (base, factor) in zip(self._trainer.optimizer.param_groups, rates, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)

    def explain_divergence(self, metrics: dict[str, float]) -> str:
        """What to say of a loss or gradient that is no number."""
        trainer = self._trainer
        return nonfinite_message(
            metrics,
            step=trainer.step + 1,
            rows=trainer.rows,
            checkpoint=self.manager.latest() if self.manager else None,
            learning_rate=trainer.optimizer.param_groups[0]["lr"],
        )

    def _identity(self) -> dict[str, tuple[str, int]]:
        trainer = self._trainer
        return {
            "num_examples": ("training examples", len(trainer.examples)),
            "num_processes": ("processes", trainer.parallel.world_size),
        }

    def _describe(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.step / trainer.steps_per_epoch,
            "num_tokens": trainer.num_tokens,
            **{key: have for key, (_, have) in self._identity().items()},
            "scheduler": trainer.scheduler.state_dict(),
            "loss_scaler": trainer.parallel.scaler_state(),
            "stopping": self.stopping.state(),
            "method": trainer.extra_state(),
        }

    def _save_own(self, folder: Path) -> None:
        """This process's part of a checkpoint."""
        trainer = self._trainer
        if trainer.parallel.deepspeed:
            trainer._prepared.save_checkpoint(
                str(folder / _DEEPSPEED), tag="state", exclude_frozen_parameters=True
            )
        elif trainer.parallel.fsdp:
            _save_full_optimizer(
                trainer.scorer, trainer.optimizer, folder / _OPTIMIZER, write=trainer.parallel.is_main
            )
        elif trainer.parallel.is_main:
            save_optimizer_state(trainer.optimizer, folder / _OPTIMIZER)
        save_rng_state(folder / self._rng_file())

    def _rng_file(self) -> str:
        rank = self._trainer.parallel.rank
        return f"rng_state_{rank}.safetensors" if rank else "rng_state.safetensors"

    def _manager(self) -> CheckpointManager:
        if self.manager is None:
            raise ValueError("this trainer keeps no checkpoints: it was made without a run folder")
        return self.manager


def _agreed(text: str) -> str:
    """What the first process said."""
    box = [text]
    dist.broadcast_object_list(box)
    return box[0]


def _save_full_optimizer(scorer: Any, optimizer: Any, path: Path, *, write: bool) -> None:
    """Gather a sharded optimizer's state and write it as one safetensors file; all processes must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_optimizer_state_dict(scorer, optimizer, options=options)
    if write:
        entries = ((name, *entry) for name, values in state["state"].items() for entry in values.items())
        tensors = {f"{name}|{key}": value.contiguous() for name, key, value in entries}
        save_file(tensors, str(path), metadata={"param_groups": json.dumps(state["param_groups"])})


def _load_full_optimizer(scorer: Any, optimizer: Any, path: Path) -> None:
    """Spread a state that `_save_full_optimizer` wrote over the processes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    state: dict[str, Any] = {}
    with safe_open(str(path), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is not a dict
            name, _, entry = key.rpartition("|")
            state.setdefault(name, {})[entry] = file.get_tensor(key)
        groups = json.loads(file.metadata()["param_groups"])
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(scorer, optimizer, {"state": state, "param_groups": groups}, options=options)
