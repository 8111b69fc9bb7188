"""Checkpoints that a killed run can always resume from, bit for bit, and nothing in them pickled.

Covered: a kill at any moment (a checkpoint appears whole or not at all, and only a whole one is resumed
from); optimizer moments, learning-rate schedule, the random state of torch (CPU and every GPU) and of
`random`.
Not covered: the random state of numpy and of other libraries, and kernels that are not deterministic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from rlhf_data import UserError, atomic_folder, atomic_write_json

__all__ = [
    "STATE_FILE",
    "CheckpointManager",
    "load_optimizer_state",
    "load_rng_state",
    "load_weights",
    "save_optimizer_state",
    "save_rng_state",
]

STATE_FILE = "trainer_state.json"
"""Written last: a checkpoint folder that has it is complete."""


class CheckpointFolders(Protocol):
    """What is needed of a run folder; `rlhf_data.RunFolder` has it."""

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        ...

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        ...

    def prune_checkpoints(self, keep: int) -> Any:
        """Remove all but the newest `keep`."""
        ...


class CheckpointManager:
    """Rolling checkpoints of a run folder.

    Args:
        run: the run folder.
        keep: how many of the newest checkpoints stay; None keeps all.
    """

    def __init__(self, run: CheckpointFolders, *, keep: int | None = None) -> None:
        self.run = run
        self.keep = keep

    @contextmanager
    def writing(self, step: int, state: dict[str, Any]) -> Iterator[Path]:
        """Yield a folder for model and optimizer files; it becomes the checkpoint when the block ends.

        Args:
            step: optimizer steps done.
            state: what else resuming needs, JSON values; it is written last, with `step` added.

        Yields:
            A temporary folder.  When the block raises, nothing is left of it.
        """
        with atomic_folder(self.run.checkpoint_path(step)) as folder:
            yield folder
            atomic_write_json(folder / STATE_FILE, {"step": step, **state})
        if self.keep is not None:
            self.run.prune_checkpoints(self.keep)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, None when there is none."""
        return self.run.latest_checkpoint()

    @staticmethod
    def read_state(folder: str | Path) -> dict[str, Any]:
        """What `writing` was given as state, with `step`.

        Raises:
            UserError: the folder is not a complete checkpoint.
        """
        path = Path(folder) / STATE_FILE
        if not path.is_file():
            raise UserError(
                f"{folder} is not a complete checkpoint: it has no {STATE_FILE}; name another one"
            )
        return json.loads(path.read_text(encoding="utf-8"))


def load_weights(model: Any, folder: str | Path) -> None:
    """Put into a model the weights that its own `save_pretrained(folder)` wrote, bit for bit.

    Args:
        model: a transformers model, a PeftModel (its adapters are read, not the frozen weights below them) or
            one of `rlhf_models`.
        folder: the checkpoint.

    Raises:
        UserError: the weights are missing or of another model.
    """
    folder = Path(folder)
    try:
        if hasattr(model, "peft_config"):
            for name in model.peft_config:  # peft writes the adapter named default into the folder itself
                place = folder if name == "default" else folder / name
                model.load_adapter(str(place), adapter_name=name, is_trainable=True)
        else:
            model.load_state_dict(type(model).from_pretrained(folder).state_dict())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{folder}: its weights do not fit this model ({error}); resume with the same model"
        ) from error


def save_optimizer_state(optimizer: Optimizer, path: str | Path) -> None:
    """Write an optimizer's state to one safetensors file: tensors as such, the rest as JSON in its header.

    Args:
        optimizer: any optimizer whose state holds tensors and JSON values.
        path: the file, for instance `checkpoint-10/optimizer.safetensors`.
    """
    state = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value.contiguous()
            else:
                plain.setdefault(str(index), {})[name] = value
    header = {"param_groups": state["param_groups"], "plain": plain}
    save_file(tensors, str(path), metadata={"state": json.dumps(header)})


def load_optimizer_state(optimizer: Optimizer, path: str | Path) -> None:
    """Read what `save_optimizer_state` wrote into an optimizer over the same parameters in the same order.

    Raises:
        UserError: the file is missing or damaged, or is of an optimizer over other parameters.
    """
    tensors, header = _read(path)
    state: dict[int, dict[str, Any]] = {int(index): entries for index, entries in header["plain"].items()}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    matching = [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in header["param_groups"]
    ] and all(_moments_fit(entries, parameters[index]) for index, entries in state.items())
    if not matching:
        raise UserError(f"{path} belongs to an optimizer over other parameters; resume with the same model")
    optimizer.load_state_dict({"state": state, "param_groups": header["param_groups"]})


def save_rng_state(path: str | Path) -> None:
    """Write the random state of torch (CPU, every GPU) and of `random` to one safetensors file."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    save_file(tensors, str(path), metadata={"state": json.dumps({"python": random.getstate()})})


def load_rng_state(path: str | Path) -> None:
    """Read back what `save_rng_state` wrote; states of GPUs that are not here are left out.

    Raises:
        UserError: the file is missing or damaged.
    """
    tensors, header = _read(path)
    torch.set_rng_state(tensors["cpu"])
    for i in range(torch.cuda.device_count()):
        if f"cuda.{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{i}"], i)
    version, numbers, gauss = header["python"]
    random.setstate((version, tuple(numbers), gauss))


def _moments_fit(entries: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether every tensor kept for a parameter is a scalar or has the parameter's shape."""
    shapes = [value.shape for value in entries.values() if isinstance(value, torch.Tensor)]
    return all(shape in (torch.Size([]), parameter.shape) for shape in shapes)


def _read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and JSON header of a file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is not a dict
            return tensors, json.loads((file.metadata() or {})["state"])
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read as saved state ({error}); resume from another checkpoint"
        ) from error
