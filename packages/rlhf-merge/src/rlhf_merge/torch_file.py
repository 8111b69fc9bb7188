"""Tensors of a file of `torch.save` (`pytorch_model.bin`), read in pieces; nothing in its pickle is run."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_merge.errors import MergeError
from rlhf_merge.safetensors_file import DTYPES, dropped_range

_ZIP_MAGIC = b"PK\x03\x04"
_WRAPPER = "state_dict"


class TorchTensor:
    """A tensor of a file of `torch.save`; see `rlhf_merge.tensors.Readable`.

    Args:
        tensor: the tensor, contiguous or not.
        maps: pairs of addresses between which the file is mapped to memory; empty where it is not.
    """

    row_length = 1

    def __init__(self, tensor: torch.Tensor, maps: Sequence[tuple[int, int]] = ()) -> None:
        self._tensor = tensor
        address = tensor.data_ptr()
        self._map = next((pair for pair in maps if pair[0] <= address < pair[1]), (0, 0))
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements `start` to `stop` of the flattened tensor to `out`, converted to its type."""
        if start == stop:
            return
        rows, piece = self._piece(start, stop)
        out.copy_(piece if out.device.type == "cpu" else piece.to(out.device))
        self._drop(rows)

    def _piece(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of the tensor's memory that is touched, and the elements in it."""
        if self._tensor.is_contiguous():
            piece = self._tensor.view(-1)[start:stop]
            return piece, piece
        # Only whole rows of the first dimension can be made contiguous without a copy of the whole.
        row = math.prod(self.shape[1:])
        first = start // row
        rows = self._tensor[first : -(-stop // row)]
        return rows, rows.reshape(-1)[start - first * row : stop - first * row]

    def _drop(self, piece: torch.Tensor) -> None:
        """Let the kernel take back the pages of the piece; a later read brings them again."""
        low, high = self._map
        reach = sum((length - 1) * stride for length, stride in zip(piece.shape, piece.stride(), strict=True))
        start = piece.data_ptr() - low
        stop = start + (reach + 1) * piece.element_size()
        # Memory that is not the file's would come back as zeros.
        if start >= 0 and stop <= high - low:
            first, length = dropped_range(start, stop, high - low)
            _libc().madvise(ctypes.c_void_p(low + first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


class TorchFile:
    """One file of `torch.save`: a dictionary of tensors, bare or under the key `state_dict`.

    Args:
        path: the file.  One written by torch 1.5 or earlier is read to memory, any later one is mapped.

    Attributes:
        path: the file.
        tensors: its tensors by name, in the order of the dictionary.

    Raises:
        MergeError: the file is damaged, its pickle asks for more than tensors, or it holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        content = _load(path, is_zip)
        if isinstance(content, Mapping) and isinstance(content.get(_WRAPPER), Mapping):
            content = content[_WRAPPER]
        if not isinstance(content, Mapping):
            raise MergeError(
                f"{path} holds a {type(content).__name__} where a dictionary of tensors was expected; save "
                "the model's state_dict()."
            )
        maps = _maps_of(path) if is_zip else []
        self.tensors = {
            str(name): TorchTensor(_checked(path, name, value), maps) for name, value in content.items()
        }

    def close(self) -> None:
        """Let go of the file; the map goes with the last tensor of it that somebody still holds."""
        self.tensors = {}


def _load(path: Path, is_zip: bool) -> Any:
    """What the file holds, mapped rather than read where it is a zip archive."""
    try:
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise MergeError(
            f"{path} is damaged or its pickle asks for more than tensors ({_reason(error)}); it was not "
            "unpickled: get the model as safetensors."
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise MergeError(
            f"{path} cannot be read as a file of torch.save ({_reason(error)}); copy it anew."
        ) from None


def _reason(error: Exception) -> str:
    """What torch says, without its advice to switch the check off."""
    text = str(error)
    for marker in ("Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in text:
            return f"it names {text.split(marker)[1].split()[0]}"
    return (text.splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".:")


def _checked(path: Path, name: Any, value: Any) -> torch.Tensor:
    """One entry of the dictionary, if it is a tensor that can be read."""
    if not isinstance(value, torch.Tensor):
        raise MergeError(
            f"{path}: entry {name!r} is a {type(value).__name__} where a tensor was expected; save the "
            "model's state_dict() alone."
        )
    if value.layout != torch.strided or value.device.type != "cpu" or value.dtype not in DTYPES.values():
        kind = str(value.dtype if value.layout == torch.strided else value.layout).removeprefix("torch.")
        raise MergeError(
            f"{path}: tensor {name!r} is of type {kind}, which cannot be merged; dequantise the model first "
            f"(types read: {', '.join(DTYPES)})."
        )
    return value.detach()


def _maps_of(path: Path) -> list[tuple[int, int]]:
    """The pairs of addresses between which this process has mapped the file; empty where that is not known.

    torch keeps them to itself; Linux lists them.
    """
    if sys.platform != "linux":
        return []
    real = os.path.realpath(path)
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5] == real:
                low, high = fields[0].split("-")
                found.append((int(low, 16), int(high, 16)))
    return found


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library of this process."""
    return ctypes.CDLL(None)
