"""Trained weights and optimizer state of a sharded module, written and read in parallel as safetensors.

Every process writes its rows of every tensor into files of its own (torch.distributed.checkpoint).  Any
number of processes can read them, each the rows that it then has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from rlhf_data import UserError

__all__ = ["load_sharded_state", "read_whole_weights", "save_sharded_state"]

_WEIGHT, _SEPARATOR = "weight", "|"


def save_sharded_state(module: nn.Module, optimizer: Optimizer, folder: str | Path) -> None:
    """Write a module's trained parameters and the state of their optimizer; every process must call it."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _stepped(module, optimizer):
        tensors[f"{_WEIGHT}{_SEPARATOR}{name}"] = parameter.detach()
        for entry, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{entry}{_SEPARATOR}{name}"] = value
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(tensors, storage_writer=writer)


@torch.no_grad()
def load_sharded_state(module: nn.Module, optimizer: Optimizer, folder: str | Path) -> None:
    """Put what `save_sharded_state` wrote into a module and its optimizer; every process must call it.

    Raises:
        UserError: the files are missing or damaged, or belong to other parameters.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        stored: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} cannot be read as saved state ({error}); resume from another checkpoint",
            code="unreadable_file",
        ) from error
    trained: dict[str, Any] = dict(_stepped(module, optimizer))
    tensors: dict[str, Any] = {}
    for key, entry in stored.items():
        _, _, name = key.partition(_SEPARATOR)
        like = trained.get(name)
        scalar = not entry.size
        if like is None or not (scalar or like.shape == entry.size):
            raise UserError(
                f"{folder} holds {name}, which this model lacks or has in another shape; resume with the same"
                " model and settings",
                code="other_parameters",
            )
        device = like.to_local().device if hasattr(like, "to_local") else like.device
        tensors[key] = torch.zeros((), device=device) if scalar else torch.zeros_like(like.detach())
    if missing := [name for name in trained if f"{_WEIGHT}{_SEPARATOR}{name}" not in tensors]:
        raise UserError(
            f"{folder} lacks {missing[0]}; resume with the same model and settings", code="other_parameters"
        )
    load(tensors, storage_reader=reader)
    optimizer.state.clear()  # of a training that goes back to its start, whose checkpoint has none
    for key, value in tensors.items():
        entry, _, name = key.partition(_SEPARATOR)
        if entry == _WEIGHT:
            trained[name].copy_(value)
        else:
            optimizer.state[trained[name]][entry] = value


def read_whole_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The trained parameters in files that `save_sharded_state` wrote, by name, whole, one at a time."""
    parts: dict[str, list[tuple[list[int], Path]]] = {}
    try:
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
                for key in sorted(file.keys()):
                    entry, _, name = key.partition(_SEPARATOR)
                    if entry == _WEIGHT:
                        parts.setdefault(name, []).append((offsets[key]["saved_offsets"], path))
        for name, pieces in sorted(parts.items()):
            yield name, _joined(f"{_WEIGHT}{_SEPARATOR}{name}", pieces)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder} cannot be read as saved state ({error}); name another checkpoint",
            code="unreadable_file",
        ) from error


def _joined(key: str, pieces: list[tuple[list[int], Path]]) -> Tensor:
    """A tensor from the files that hold blocks of its rows, each with its offset."""
    rows: list[Tensor] = []
    for _, path in sorted(pieces):
        with safe_open(str(path), framework="pt") as file:
            rows.append(file.get_tensor(key))
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _stepped(module: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module that its optimizer steps, by name."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [(name, parameter) for name, parameter in module.named_parameters() if id(parameter) in stepped]
