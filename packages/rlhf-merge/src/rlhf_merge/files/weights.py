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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_merge.errors import MergeError, readable
from rlhf_merge.files.folder import is_file
from rlhf_merge.methods.blocks import MemoryTensor, Readable, piece

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
"""The types that are read and written, by their names in safetensors files; others are quantised."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The types of 8 bits that are read; the result of a merge is bfloat16 where the reference has them."""

_SCALE = "_scale_inv"
"""Suffixes that make the name of an FP8 weight's scales from the weight's."""
_LENGTH_BYTES = 8
_ZIP_MAGIC = b"PK\x03\x04"

_scratch = threading.local()
"""One buffer of bytes for each thread, for pieces that are converted."""


class OpenFile:
    """A file that is open for reading at any place, from any thread."""

    def __init__(self, path: Path) -> None:
        if not hasattr(os, "preadv"):
            message = "this system cannot read files at a place (preadv); use Linux, macOS or WSL."
            raise MergeError(message, code="unsupported_system")
        self.path = path
        with readable(path):
            is_file(path)
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._closed = weakref.finalize(self, os.close, self._file)

    def read(self, begin: int, out: Tensor) -> None:
        """Fill `out`, contiguous, with the bytes from `begin` on."""
        left = out.view(torch.uint8).numpy().data
        with readable(self.path):
            while left:
                count = os.preadv(self._file, [left], begin)
                if not count:
                    message = f"{self.path} ended at byte {begin} while it was read, {len(left)} too early"
                    raise MergeError(f"{message}; copy it again.", code="truncated_file", path=str(self.path))
                left, begin = left[count:], begin + count

    def close(self) -> None:
        """Close it; a later `read` fails."""
        self._file = -1
        self._closed()


@dataclass(eq=False)
class FileTensor:
    """A tensor in a file, from byte `begin` on, with strides where it is not contiguous; see `Readable`."""

    file: OpenFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    strides: tuple[int, ...] | None = None
    row_length: int = 1

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """See `Readable.read`."""
        if start == stop:
            return
        if self.strides is not None:
            out.copy_(self._strided(start, stop, self.strides))
        elif out.dtype == self.dtype and out.is_contiguous():
            self.file.read(self.begin + start * self.dtype.itemsize, out)
        else:
            out.copy_(self._numbers(start, stop - start))

    def _numbers(self, first: int, count: int) -> Tensor:
        """Numbers as they lie in the file, in this thread's buffer."""
        size = count * self.dtype.itemsize
        buffer = getattr(_scratch, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = _scratch.buffer = torch.empty(size, dtype=torch.uint8)
        self.file.read(self.begin + first * self.dtype.itemsize, buffer[:size])
        return buffer[:size].view(self.dtype)

    def _strided(self, start: int, stop: int, strides: tuple[int, ...]) -> Tensor:
        """A piece of a tensor that is not contiguous: the rows of its first dimension that it touches."""
        row = math.prod(self.shape[1:])
        first, last = start // row, -(-stop // row)
        shape = (last - first, *self.shape[1:])
        reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        rows = self._numbers(first * strides[0], reach + 1).as_strided(shape, strides)
        return rows.reshape(-1)[start - first * row : stop - first * row]


def read_weights(path: Path) -> tuple[OpenFile, dict[str, Readable]]:
    """The tensors of a safetensors file or of a file of `torch.save`, whose pickle is not run, and the file.

    A file of `torch.save` holds a dictionary of tensors, bare or under the key `state_dict`. One written by
    torch 1.5 or earlier, or read with a torch that does not say where in the file its tensors are, is read to
    memory; of any other only the structure is.
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
        message = f"{file.path} is not a whole safetensors file ({error}); copy it again."
        raise MergeError(message, code="damaged_file", path=str(file.path)) from None
    length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8)
    file.read(0, length)
    text = torch.empty(int(length.view(torch.int64)), dtype=torch.uint8)
    file.read(_LENGTH_BYTES, text)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError("the header names a tensor twice")
        return values

    header = json.loads(text.numpy().tobytes(), object_pairs_hook=unique)
    header.pop("__metadata__", None)
    tensors: dict[str, Readable] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = DTYPES.get(entry["dtype"]) or _refuse_type(file.path, name, entry["dtype"])
        begin = _LENGTH_BYTES + len(text) + entry["data_offsets"][0]
        tensors[name] = FileTensor(file, dtype, tuple(entry["shape"]), begin)
    return tensors


def _read_torch(file: OpenFile) -> dict[str, Readable]:
    with file.path.open("rb") as begin:
        is_zip = begin.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    tensors = _load(file.path, "meta" if is_zip else "cpu")
    if is_zip and any(_place(tensor) is None for tensor in tensors.values()):
        tensors = _load(file.path, "cpu")
    found: dict[str, Readable] = {}
    for name, tensor in tensors.items():
        if tensor.device.type != "meta":
            found[name] = MemoryTensor(tensor)
            continue
        place = (_place(tensor) or 0) + int(tensor.storage_offset()) * tensor.element_size()
        strides = None if tensor.is_contiguous() else tensor.stride()
        found[name] = FileTensor(file, tensor.dtype, tuple(tensor.shape), place, strides)
    return found


def _place(tensor: Tensor) -> int | None:
    """File offset of the storage of a tensor on the device `meta`; None if torch does not record it."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def _load(path: Path, device: str) -> dict[str, Tensor]:
    """The tensors of the file; on the device `meta` no numbers are read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old protocols, which are refused or read like any other
            content = torch.load(str(path), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        found = f"{path} is damaged or its pickle asks for more than tensors ({_reason(error)}), and is not "
        found += "run: get the model as safetensors."
        raise MergeError(found, code="damaged_file", path=str(path)) from None
    except Exception as error:  # what torch raises over damaged bytes differs between its versions
        found = f"{path} cannot be read as a file of torch.save ({_reason(error)}); copy it again."
        raise MergeError(found, code="damaged_file", path=str(path)) from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        found = f"{path} holds a {type(content).__name__}, expected a dictionary of tensors"
        raise MergeError(f"{found}; save the state_dict().", code="invalid_value", path=str(path))
    tensors = {}
    for name, value in content.items():
        if not isinstance(value, Tensor):
            found = f"{path}: entry {name!r} is a {type(value).__name__}, expected a tensor"
            raise MergeError(f"{found}; save the state_dict() alone.", code="invalid_value", path=str(path))
        if value.layout != torch.strided or value.dtype not in DTYPES.values():
            kind = value.dtype if value.layout == torch.strided else value.layout
            _refuse_type(path, name, str(kind).removeprefix("torch."))
        tensors[str(name)] = value.detach()
    return tensors


def _reason(error: Exception) -> str:
    """Torch's message, without its advice to switch the check off."""
    text = str(error)
    for marker in ("Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in text:
            return f"it names {text.split(marker)[1].split()[0]}"
    return (text.splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".:")


def _refuse_type(path: Path, name: Any, kind: str) -> NoReturn:
    message = f"{path}: tensor {name!r} is of type {kind}, expected {', '.join(DTYPES)}"
    raise MergeError(f"{message}; dequantise the model first.", code="quantized_model", tensor=str(name))


def dequantised(tensors: Mapping[str, Readable], config: Mapping[str, Any]) -> dict[str, Readable] | None:
    """The tensors of a block-scaled FP8 checkpoint, as DeepSeek's, multiplied by their scales when read.

    Its `quantization_config` has `weight_block_size` [b₁, b₂]; the scales of `name` are `name_scale_inv`,
    (⌈rows/b₁⌉, ⌈columns/b₂⌉). None where the checkpoint is quantised in another way.
    """
    block = config.get("weight_block_size")
    if config.get("quant_method") != "fp8" or not block:
        return None
    rows, columns = (int(size) for size in block)
    result: dict[str, Readable] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors:
            continue
        scale = tensors.get(name + _SCALE)
        if scale is None and (tensor.dtype not in FLOAT8 or len(tensor.shape) != 2):
            result[name] = tensor
            continue
        expected = tuple(-(-n // size) for n, size in zip(tensor.shape, (rows, columns), strict=True))
        found = None if scale is None else scale.shape
        if scale is None or found != expected or tensor.dtype not in FLOAT8:
            message = f"{name!r} is {tensor.dtype} with scales {found}, expected FP8 with {expected}"
            raise MergeError(f"{message}; copy the model again.", code="quantized_model", tensor=name)
        result[name] = _ScaledTensor(tensor, scale, (rows, columns))
    return result


class _ScaledTensor:
    """A matrix (rows, columns) of FP8 numbers times the scale of the block each lies in; see `Readable`."""

    dtype = torch.bfloat16

    def __init__(self, numbers: Readable, scale: Readable, block: tuple[int, int]) -> None:
        self._numbers, self._scale, self._block = numbers, scale, block
        self.shape, self.row_length = numbers.shape, numbers.shape[1]

    def read(self, start: int, stop: int, out: Tensor) -> None:
        first, last = start // self.row_length, stop // self.row_length
        if first == last:
            return
        kind = torch.promote_types(out.dtype, torch.float32)
        values = out if out.dtype == kind else torch.empty(stop - start, dtype=kind)
        self._numbers.read(start, stop, values)
        height, width = self._block
        low, high = first // height, -(-last // height)
        count = math.ceil(self.row_length / width)
        scales = piece(self._scale, low * count, high * count, kind).view(-1, count)
        rows = values.view(last - first, self.row_length)
        for part in range(low, high):
            begin, end = max(part * height, first) - first, min((part + 1) * height, last) - first
            rows[begin:end] *= scales[part - low].repeat_interleave(width)[: self.row_length]
        if values is not out:
            out.copy_(values)
