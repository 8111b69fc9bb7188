"""Files of weights, whose tensors are read in pieces; a file is never mapped to memory.

An input that shrinks, or a disk that fails, while it is read is an error here; under a memory map it would
end the process with SIGBUS.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlhf_merge.errors import MergeError, readable, regular
from rlhf_merge.methods.blocks import MemoryTensor
from rlhf_merge.tensors import Readable

_scratch = threading.local()
"""One buffer of bytes for each thread, for pieces that are converted."""


class OpenFile:
    """A file that is open for reading at any place, from any thread.

    Args:
        path: the file.

    Raises:
        MergeError: it cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        if not hasattr(os, "preadv"):
            raise MergeError("this system cannot read files at a place (preadv); use Linux, macOS or WSL.")
        self.path = path
        with readable(path):
            self._file = os.open(regular(path), os.O_RDONLY | os.O_CLOEXEC)
        self._closed = weakref.finalize(self, os.close, self._file)

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Fill `out`, contiguous, with the bytes from `begin` on."""
        left = out.view(torch.uint8).numpy().data
        with readable(self.path):
            while left:
                count = os.preadv(self._file, [left], begin)
                if not count:
                    raise MergeError(
                        f"{self.path} ended at byte {begin} while it was read, {len(left)} too early; copy "
                        "it anew.",
                        code="truncated_file",
                    )
                left, begin = left[count:], begin + count

    def close(self) -> None:
        """Close it; a later `read` fails."""
        self._file = -1
        self._closed()


class FileTensor:
    """A tensor in a file; see `rlhf_merge.tensors.Readable`.

    Args:
        file: it lies in.
        dtype: of its numbers.
        shape: its shape.
        begin: where its first number is, in bytes.
        strides: elements from one index to the next by dimension; None where it is contiguous.
    """

    row_length = 1

    def __init__(
        self,
        file: OpenFile,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        begin: int,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._file, self._begin, self._strides = file, begin, strides
        self.dtype, self.shape = dtype, shape

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements `start` to `stop` of the flattened tensor to `out`, converted to its type."""
        if start == stop:
            return
        if self._strides is not None:
            out.copy_(self._strided(start, stop, self._strides))
        elif out.dtype == self.dtype and out.is_contiguous():
            self._file.read(self._begin + start * self.dtype.itemsize, out)
        else:
            out.copy_(self._numbers(start, stop - start))

    def _numbers(self, first: int, count: int) -> torch.Tensor:
        """Numbers as they lie in the file, in this thread's buffer."""
        size = count * self.dtype.itemsize
        buffer = getattr(_scratch, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = _scratch.buffer = torch.empty(size, dtype=torch.uint8)
        self._file.read(self._begin + first * self.dtype.itemsize, buffer[:size])
        return buffer[:size].view(self.dtype)

    def _strided(self, start: int, stop: int, strides: tuple[int, ...]) -> torch.Tensor:
        """A piece of a tensor that is not contiguous: the rows of its first dimension that it touches."""
        row = math.prod(self.shape[1:])
        first, last = start // row, -(-stop // row)
        shape = (last - first, *self.shape[1:])
        reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        rows = self._numbers(first * strides[0], reach + 1).as_strided(shape, strides)
        return rows.reshape(-1)[start - first * row : stop - first * row]


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types that are read, by their names in the format; the others are packed or quantised."""

_LENGTH_BYTES = 8


def read_weights(path: Path) -> tuple[OpenFile, dict[str, Readable]]:
    """The tensors of a safetensors file or of a file of `torch.save`, whose pickle is not run, and the file.

    A file of `torch.save` holds a dictionary of tensors, bare or under the key `state_dict`. One written by
    torch 1.5 or earlier, or read with a torch that does not say where in the file its tensors are, is read to
    memory; of any other only the structure is.

    Returns:
        The open file, and the tensors by name in the order of their bytes or of the dictionary.

    Raises:
        MergeError: the file is damaged, holds anything but tensors, or a tensor of a type that is not read.
    """
    file = OpenFile(path)
    try:
        with readable(path):
            return file, _read_safetensors(file) if path.suffix == ".safetensors" else _read_torch(file)
    except BaseException:
        file.close()
        raise


def _read_safetensors(file: OpenFile) -> dict[str, Readable]:
    """The tensors, once the library has checked the header against the format and the file's size."""
    try:
        with safe_open(file.path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise MergeError(
            f"{file.path} is not a whole safetensors file ({error}); copy it anew.", code="damaged_file"
        ) from None
    length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8)
    file.read(0, length)
    text = torch.empty(int(length.view(torch.int64)), dtype=torch.uint8)
    file.read(_LENGTH_BYTES, text)
    header = json.loads(text.numpy().tobytes(), object_pairs_hook=_unique)
    header.pop("__metadata__", None)
    data = _LENGTH_BYTES + len(text)
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {
        name: FileTensor(
            file,
            _dtype(file.path, name, entry["dtype"]),
            tuple(entry["shape"]),
            data + entry["data_offsets"][0],
        )
        for name, entry in entries
    }


def _dtype(path: Path, name: str, code: str) -> torch.dtype:
    if code not in DTYPES:
        raise _unread(path, name, code)
    return DTYPES[code]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose names occur once."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("the header names a tensor twice")
    return values


_ZIP_MAGIC = b"PK\x03\x04"
_WRAPPER = "state_dict"


def _read_torch(file: OpenFile) -> dict[str, Readable]:
    with file.path.open("rb") as begin:
        is_zip = begin.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    content = _load(file.path, "meta" if is_zip else "cpu")
    if is_zip and any(_place(tensor) is None for _, tensor in _entries(file.path, content)):
        content = _load(file.path, "cpu")
    return {name: _readable(file, tensor) for name, tensor in _entries(file.path, content)}


def _readable(file: OpenFile, tensor: torch.Tensor) -> Readable:
    if tensor.device.type != "meta":
        return MemoryTensor(tensor)
    begin = (_place(tensor) or 0) + int(tensor.storage_offset()) * tensor.element_size()
    strides = None if tensor.is_contiguous() else tensor.stride()
    return FileTensor(file, tensor.dtype, tuple(tensor.shape), begin, strides)


def _place(tensor: torch.Tensor) -> int | None:
    """Where in the file the storage of a tensor of the device `meta` begins; None if torch is silent."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def _entries(path: Path, content: Any) -> list[tuple[str, torch.Tensor]]:
    """The names and tensors of what a file holds."""
    if isinstance(content, Mapping) and isinstance(content.get(_WRAPPER), Mapping):
        content = content[_WRAPPER]
    if not isinstance(content, Mapping):
        raise MergeError(
            f"{path} holds a {type(content).__name__}, expected a dictionary of tensors; save the "
            "state_dict().",
            code="invalid_value",
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
            f"{path} is damaged or its pickle asks for more than tensors ({_reason(error)}), which is not "
            "run: get the model as safetensors.",
            code="damaged_file",
        ) from None
    except Exception as error:  # what torch raises over damaged bytes differs between its versions
        raise MergeError(
            f"{path} cannot be read as a file of torch.save ({_reason(error)}); copy it anew.",
            code="damaged_file",
        ) from None


def _reason(error: Exception) -> str:
    """What torch says, without its advice to switch the check off."""
    text = str(error)
    for marker in ("Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in text:
            return f"it names {text.split(marker)[1].split()[0]}"
    return (text.splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".:")


def _unread(path: Path, name: Any, kind: str) -> MergeError:
    return MergeError(
        f"{path}: tensor {name!r} is of type {kind}, expected {', '.join(DTYPES)}; dequantise the model "
        "first.",
        code="quantized_model",
    )


def _checked(path: Path, name: Any, value: Any) -> torch.Tensor:
    """One entry of the dictionary, if it is a tensor that can be read."""
    if not isinstance(value, torch.Tensor):
        raise MergeError(
            f"{path}: entry {name!r} is a {type(value).__name__}, expected a tensor; save the state_dict() "
            "alone.",
            code="invalid_value",
        )
    if value.layout != torch.strided or value.dtype not in DTYPES.values():
        kind = str(value.dtype if value.layout == torch.strided else value.layout).removeprefix("torch.")
        raise _unread(path, name, kind)
    return value.detach()
