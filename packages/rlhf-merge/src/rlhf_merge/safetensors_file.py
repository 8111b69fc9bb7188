"""Tensors of a safetensors file, read in pieces from one memory map without keeping what was read resident.

The format: eight bytes with the length of the header (little-endian), the header (JSON: name to type, shape
and the two offsets of the bytes), then the bytes of all tensors, one behind the other.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_merge.errors import MergeError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types that are read; the others are packed or quantised."""

_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""

_MAPPED_ALONG = 1 << 21
"""Bytes; Linux maps up to this much around a page that is touched: a large folio of the page cache, at most
what one entry of a page middle directory covers."""


def dropped_range(start: int, stop: int, size: int) -> tuple[int, int]:
    """The range of a mapping to drop after bytes `start` to `stop` of its `size` bytes were read.

    Returns:
        First byte, a multiple of the page size, and length.  It also covers what the kernel mapped beside the
        piece: without that, 7 MB of a file of 300 MB stayed resident after it was read in pieces of 512 KiB,
        and with it 0.
    """
    page = mmap.PAGESIZE
    first = max(0, start - _MAPPED_ALONG) // page * page
    return first, min(size, stop + _MAPPED_ALONG) - first


class _Mapping:
    """A file mapped read-only, as a tensor of bytes that is valid as long as this object is."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._map)
        # torch warns of a read-only buffer, and a private writable map of a file larger than the memory is
        # refused by the kernel: hence an array at the map's address, which torch takes without a look at the
        # rights.
        address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        array = (ctypes.c_uint8 * self.size).from_address(address)
        self.bytes = torch.frombuffer(array, dtype=torch.uint8)

    def drop(self, start: int, stop: int) -> None:
        """Let the kernel take back the pages of bytes `start` to `stop`; a later read brings them again."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, *dropped_range(start, stop, self.size))


class MappedTensor:
    """A tensor of a safetensors file; see `rlhf_merge.tensors.Readable`."""

    row_length = 1

    def __init__(self, mapping: _Mapping, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> None:
        self._mapping = mapping
        self._begin = begin
        self.dtype = dtype
        self.shape = shape

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements `start` to `stop` of the flattened tensor to `out`, converted to its type."""
        if start == stop:
            return
        first = self._begin + start * self.dtype.itemsize
        last = self._begin + stop * self.dtype.itemsize
        piece = self._mapping.bytes[first:last]
        if first % self.dtype.itemsize:
            piece = piece.clone()
        piece = piece.view(self.dtype)
        # The conversion of what goes to another device is done there: fewer bytes on the way.
        out.copy_(piece if out.device.type == "cpu" else piece.to(out.device))
        self._mapping.drop(first, last)


class SafetensorsFile:
    """One safetensors file.

    Args:
        path: the file.

    Attributes:
        path: the file.
        tensors: its tensors by name, in the order of their bytes.

    Raises:
        MergeError: the file is not a whole safetensors file, or holds a tensor of a type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = os.stat(path).st_size
        if size < _LENGTH_BYTES:
            raise MergeError(
                f"{path} is cut short: {size} bytes are too few for a safetensors file; copy it anew."
            )
        mapping = _Mapping(path)
        header, data = _read_header(path, size)
        entries = [_parse_entry(path, name, entry) for name, entry in header.items()]
        entries.sort(key=lambda entry: entry[3:])
        _check_layout(path, entries, size - data)
        self.tensors = {
            name: MappedTensor(mapping, dtype, shape, data + begin)
            for name, dtype, shape, begin, _ in entries
        }

    def close(self) -> None:
        """Let go of the file; the map goes with the last tensor of it that somebody still holds."""
        self.tensors = {}


_Entry = tuple[str, torch.dtype, tuple[int, ...], int, int]
"""Name, type, shape, first byte and end of the bytes of a tensor, counted from the end of the header."""


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header's entries and where the bytes of the tensors begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(_MAX_HEADER, size - _LENGTH_BYTES):
            raise MergeError(
                f"{path} is not a safetensors file or is cut short: it has {size} bytes and announces a "
                f"header of {length}; copy it anew."
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise MergeError(f"{path} is not a safetensors file: its header is not a JSON object; copy it anew.")
    header.pop("__metadata__", None)
    return header, _LENGTH_BYTES + length


def _parse_entry(path: Path, name: str, entry: Any) -> _Entry:
    """One tensor's entry of the header, checked in itself."""
    try:
        code = str(entry["dtype"])
        shape = tuple(int(length) for length in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise MergeError(
            f"{path}: the header's entry of tensor {name!r} lacks a type, a shape or two offsets; copy the "
            "file anew."
        ) from None
    if code not in DTYPES:
        raise MergeError(
            f"{path}: tensor {name!r} is of type {code}, which cannot be merged; dequantise the model first "
            f"(types read: {', '.join(DTYPES)})."
        )
    dtype = DTYPES[code]
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != end - begin:
        raise MergeError(
            f"{path}: tensor {name!r} of shape {list(shape)} and type {code} has offsets {begin} to {end}, "
            "which are not its size; copy the file anew."
        )
    return name, dtype, shape, begin, end


def _check_layout(path: Path, entries: list[_Entry], available: int) -> None:
    """Refuse a file whose tensors do not lie one behind the other or end elsewhere than the file."""
    expected = 0
    for name, _, _, begin, end in entries:
        if begin != expected:
            raise MergeError(
                f"{path}: tensor {name!r} begins at byte {begin} where {expected} was expected; copy the "
                "file anew."
            )
        if end > available:
            raise MergeError(
                f"{path} is cut short: tensor {name!r} ends at byte {end} and the file holds {available} "
                "bytes of tensors; copy it anew."
            )
        expected = end
    if expected != available:
        raise MergeError(
            f"{path} holds {available} bytes of tensors where its header names {expected}; copy it anew."
        )
