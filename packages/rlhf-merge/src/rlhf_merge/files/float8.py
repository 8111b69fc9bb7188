"""Checkpoints in 8-bit floating point: weights with a scale for each block, as DeepSeek's are released."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rlhf_merge.errors import MergeError
from rlhf_merge.tensors import Readable

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The types of 8 bits that are read; the result of a merge is bfloat16 where the reference has them."""

_SCALE = "_scale_inv"
"""What follows a weight's name in that of its scales."""


def dequantised(
    tensors: Mapping[str, Readable], config: Mapping[str, Any], where: str
) -> dict[str, Readable] | None:
    """The tensors of a block-scaled FP8 checkpoint, multiplied by their scales as they are read.

    Args:
        tensors: of the checkpoint; the scales of `name` are `name_scale_inv`, (⌈rows/b₁⌉, ⌈columns/b₂⌉).
        config: `quantization_config` of its config.json, with `weight_block_size` [b₁, b₂].
        where: the folder, for messages.

    Returns:
        The tensors without the scales; None where the checkpoint is quantised in another way.

    Raises:
        MergeError: scales do not fit their weight, or an FP8 matrix has none.
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
        if scale is None:
            if tensor.dtype in FLOAT8 and len(tensor.shape) == 2:
                raise MergeError(
                    f"{where}: {name!r} is an FP8 matrix without its scales {name + _SCALE!r}; copy the "
                    "model anew.",
                    code="quantized_model",
                )
            result[name] = tensor
            continue
        expected = tuple(
            -(-length // size) for length, size in zip(tensor.shape, (rows, columns), strict=True)
        )
        if scale.shape != expected or tensor.dtype not in FLOAT8:
            raise MergeError(
                f"{where}: {name + _SCALE!r} has shape {list(scale.shape)}, and {name!r} is {tensor.dtype} "
                f"of shape {list(tensor.shape)}, expected {list(expected)} and FP8; copy the model anew.",
                code="quantized_model",
            )
        result[name] = ScaledTensor(tensor, scale, (rows, columns))
    return result


class ScaledTensor:
    """A matrix of FP8 numbers times the scale of the block each lies in; see `rlhf_merge.tensors.Readable`.

    Args:
        numbers: (rows, columns).
        scale: (⌈rows/b₁⌉, ⌈columns/b₂⌉).
        block: b₁ and b₂.
    """

    dtype = torch.bfloat16

    def __init__(self, numbers: Readable, scale: Readable, block: tuple[int, int]) -> None:
        self._numbers, self._scale, self._block = numbers, scale, block
        self.shape = numbers.shape
        self.row_length = numbers.shape[1]

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements `start` to `stop`, multiples of `row_length`, to `out`, converted to its type."""
        first, last = start // self.row_length, stop // self.row_length
        if first == last:
            return
        kind = torch.promote_types(out.dtype, torch.float32)
        values = out if out.dtype == kind else torch.empty(stop - start, dtype=kind)
        self._numbers.read(start, stop, values)
        height, width = self._block
        low, high = first // height, -(-last // height)
        count = math.ceil(self.row_length / width)
        scales = torch.empty(high - low, count, dtype=kind)
        self._scale.read(low * count, high * count, scales.view(-1))
        rows = values.view(last - first, self.row_length)
        for part in range(low, high):
            begin, end = max(part * height, first) - first, min((part + 1) * height, last) - first
            rows[begin:end] *= scales[part - low].repeat_interleave(width)[: self.row_length]
        if values is not out:
            out.copy_(values)
