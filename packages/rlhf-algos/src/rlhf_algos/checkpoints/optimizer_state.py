"""Optimizer and random state as safetensors files, bit for bit and nothing pickled.

Covered: the random state of torch (CPU and every GPU) and of `random`.
Not covered: the random state of numpy and of other libraries, and kernels that are not deterministic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from rlhf_data import UserError

_QUANTISED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes' optimizers put a parameter's 8-bit moments, their scales and their code books."""


def save_optimizer_state(optimizer: Optimizer, path: str | Path) -> None:
    """Write an optimizer's state to one safetensors file: tensors as such, the rest as JSON in its header.

    Args:
        optimizer: one whose state is nested dicts of tensors and JSON values, as in torch and bitsandbytes
            (8-bit moments stay 8-bit).
        path: the file, for instance `checkpoint-10/optimizer.safetensors`.
    """
    state = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    seen: set[int] = set()
    for index, entries in state["state"].items():
        for name, value in _leaves(entries, str(index)):
            if isinstance(value, torch.Tensor):
                shared = value.data_ptr() in seen  # bitsandbytes' parameters share code books
                seen.add(value.data_ptr())
                tensors[name] = value.clone() if shared else value.contiguous()
            else:
                plain[name] = value
    header = {"param_groups": state["param_groups"], "plain": plain}
    save_file(tensors, str(path), metadata={"state": json.dumps(header)})


def load_optimizer_state(optimizer: Optimizer, path: str | Path) -> None:
    """Read what `save_optimizer_state` wrote into an optimizer over the same parameters in the same order."""
    tensors, header = _read(path)
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**header["plain"], **tensors}.items():
        index, *names, last = key.split(".")
        entries = state.setdefault(int(index), {})
        for name in names:
            entries = entries.setdefault(name, {})
        entries[last] = value
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    matching = [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in header["param_groups"]
    ] and all(_moments_fit(entries, parameters[index]) for index, entries in state.items())
    if not matching:
        raise UserError(
            f"{path} belongs to an optimizer of other parameters; resume with the same model",
            code="other_parameters",
        )
    quantised = any(_QUANTISED in entries for entries in state.values())
    if state and quantised != hasattr(optimizer, "non_castable_tensor_keys"):
        kinds = ["adamw_torch", "adamw_bnb_8bit"]
        raise UserError(
            f"{path} belongs to a different optimizer; resume with optim={kinds[quantised]}",
            code="other_optimizer",
        )
    optimizer.load_state_dict({"state": state, "param_groups": header["param_groups"]})


def _leaves(entries: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in nested dicts that is not a dict."""
    for key, value in entries.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value


def save_rng_state(path: str | Path) -> None:
    """Write the random state of torch (CPU, every GPU) and of `random` to one safetensors file."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    save_file(tensors, str(path), metadata={"state": json.dumps({"python": random.getstate()})})


def load_rng_state(path: str | Path) -> None:
    """Read back what `save_rng_state` wrote; states of GPUs that are not here are left out."""
    tensors, header = _read(path)
    torch.set_rng_state(tensors["cpu"])
    for i in range(torch.cuda.device_count()):
        if f"cuda.{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{i}"], i)
    version, numbers, gauss = header["python"]
    random.setstate((version, tuple(numbers), gauss))


def _moments_fit(entries: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether every moment kept for a parameter is a scalar or has the parameter's shape."""
    quantised = entries.get(_QUANTISED, {})
    moments = [*entries.values(), *(quantised.get(name) for name in ("state1", "state2"))]
    shapes = [value.shape for value in moments if isinstance(value, torch.Tensor)]
    return all(shape in (torch.Size([]), parameter.shape) for shape in shapes)


def _read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and JSON header of a file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in sorted(file.keys())}
            return tensors, json.loads((file.metadata() or {})["state"])
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read as saved state ({error}); resume from another checkpoint",
            code="unreadable_file",
        ) from error
