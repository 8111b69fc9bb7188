"""Copies of a player's parameters, putting them back bit for bit, and keeping them in files.

Of parameters that are sharded, a copy is of this process's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_algos import local_part, part_of_whole, set_local_part, whole_of_part
from rlhf_algos.process_group import is_main_process
from rlhf_models import write_files


def copies(parameters: Sequence[Tensor], device: str | None = None) -> list[Tensor]:
    """Contiguous copies without gradients, on a device or where the parameters are."""
    parts = (local_part(parameter) for parameter in parameters)
    return [part.to(device or part.device).clone(memory_format=torch.contiguous_format) for part in parts]


@torch.no_grad()
def fill(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into parameters, in place."""
    for parameter, value in zip(parameters, values, strict=True):
        set_local_part(parameter, value)


def save_copies(folder: Path, named: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Write copies, whole, into a folder, a few at a time; every process must call it.

    Args:
        folder: where to, a new folder.
        named: name, parameter, and the copy of it.
    """
    whole = ((name, whole_of_part(parameter, part)) for name, parameter, part in named)
    if is_main_process():
        folder.mkdir(parents=True, exist_ok=True)
        write_files(((name, tensor.detach().cpu()) for name, tensor in whole), folder)
    else:
        for _ in whole:
            pass


def load_copies(folder: Path, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The copies that `save_copies` wrote, by name; of sharded parameters, this process's part.

    Args:
        folder: what it wrote.
        parameters: by name, those that were copied.

    Raises:
        OSError: the folder or a file is missing.
        KeyError: it holds a copy of another parameter.
    """
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, part_of_whole(parameters[name], file.get_tensor(name))
