"""The tensors of a file of `torch.save` (`pytorch_model.bin`); nothing in its pickle is run."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_merge.errors import MergeError, readable
from rlhf_merge.files.file_tensor import FileTensor, OpenFile
from rlhf_merge.files.safetensors_file import DTYPES
from rlhf_merge.methods.blocks import MemoryTensor
from rlhf_merge.tensors import Readable

_ZIP_MAGIC = b"PK\x03\x04"
_WRAPPER = "state_dict"


class TorchFile:
    """One file of `torch.save`: a dictionary of tensors, bare or under the key `state_dict`.

    Args:
        path: the file.  One written by torch 1.5 or earlier, or read with a torch that does not say where in
            the file its tensors are, is read to memory; of any other only the structure is.

    Attributes:
        path: the file.
        tensors: its tensors by name, in the order of the dictionary.

    Raises:
        MergeError: the file is damaged, its pickle asks for more than tensors, or it holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = OpenFile(path)
        try:
            with readable(path):
                self.tensors = self._read()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; its tensors may not be read any more."""
        self.tensors = {}
        self._file.close()

    def _read(self) -> dict[str, Readable]:
        with self.path.open("rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        content = _load(self.path, "meta" if is_zip else "cpu")
        if is_zip and any(_place(tensor) is None for _, tensor in _entries(self.path, content)):
            content = _load(self.path, "cpu")
        return {name: self._tensor(tensor) for name, tensor in _entries(self.path, content)}

    def _tensor(self, tensor: torch.Tensor) -> Readable:
        if tensor.device.type != "meta":
            return MemoryTensor(tensor)
        begin = (_place(tensor) or 0) + int(tensor.storage_offset()) * tensor.element_size()
        strides = None if tensor.is_contiguous() else tensor.stride()
        return FileTensor(self._file, tensor.dtype, tuple(tensor.shape), begin, strides)


def _place(tensor: torch.Tensor) -> int | None:
    """Where in the file the storage of a tensor of the device `meta` begins; None if torch is silent."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def _entries(path: Path, content: Any) -> list[tuple[str, torch.Tensor]]:
    """The names and tensors of what a file holds."""
    if isinstance(content, Mapping) and isinstance(content.get(_WRAPPER), Mapping):
        content = content[_WRAPPER]
    if not isinstance(content, Mapping):
        raise MergeError(
            f"{path} holds a {type(content).__name__} where a dictionary of tensors was expected; save "
            "the model's state_dict()."
        )
    return [(str(name), _checked(path, name, value)) for name, value in content.items()]


def _load(path: Path, device: str) -> Any:
    """What the file holds; on the device `meta` no numbers are read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old protocols, which are refused or read like any other
            return torch.load(str(path), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise MergeError(
            f"{path} is damaged or its pickle asks for more than tensors ({_reason(error)}); it was not "
            "unpickled: get the model as safetensors."
        ) from None
    except Exception as error:  # what torch raises over damaged bytes differs between its versions
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
    if value.layout != torch.strided or value.dtype not in DTYPES.values():
        kind = str(value.dtype if value.layout == torch.strided else value.layout).removeprefix("torch.")
        raise MergeError(
            f"{path}: tensor {name!r} is of type {kind}, which cannot be merged; dequantise the model first "
            f"(types read: {', '.join(DTYPES)})."
        )
    return value.detach()
