"""The tensors of a safetensors file.

The format: eight bytes with the length of the header (little-endian), the header (JSON: name to type, shape
and the two offsets of the bytes), then the bytes of all tensors, one behind the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlhf_merge.errors import MergeError, readable
from rlhf_merge.files.file_tensor import FileTensor, OpenFile

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

    def _read(self) -> dict[str, FileTensor]:
        """The tensors, once the library has checked the header against the format and the file's size."""
        try:
            with safe_open(self.path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise MergeError(
                f"{self.path} is not a whole safetensors file ({error}); copy it anew."
            ) from None
        length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8)
        self._file.read(0, length)
        text = torch.empty(int(length.view(torch.int64)), dtype=torch.uint8)
        self._file.read(_LENGTH_BYTES, text)
        header = json.loads(text.numpy().tobytes(), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        data = _LENGTH_BYTES + len(text)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        return {
            name: FileTensor(
                self._file, self._dtype(name, entry), tuple(entry["shape"]), data + entry["data_offsets"][0]
            )
            for name, entry in entries
        }

    def _dtype(self, name: str, entry: dict[str, Any]) -> torch.dtype:
        code = entry["dtype"]
        if code not in DTYPES:
            raise MergeError(
                f"{self.path}: tensor {name!r} is of type {code}, which cannot be merged; dequantise the "
                f"model first (types read: {', '.join(DTYPES)})."
            )
        return DTYPES[code]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose names occur once."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("the header names a tensor twice")
    return values
