"""Linear layers in 4 bits whose packed weights are spread over processes and gathered for a pass.

bitsandbytes' own keep what was gathered for the backward pass, and its state with the parameter, which
sharding replaces.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.autograd._functions import matmul_4bit
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit, quantize_blockwise
from bitsandbytes.nn.modules import Linear4bit
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

_PIECE = 1 << 20
"""Weights that are packed at a time: on CPUs bitsandbytes takes 64 bytes and more of each while it does."""


class _Linear(torch.autograd.Function):
    """x wᵀ + b for x (..., in), packed w (out, in) and b (out,) or None; keeps the parameter that w is in.

    Both passes compute what bitsandbytes' `MatMul4Bit` does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.state = state
        return matmul_4bit(x, _bytes(packed), state, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        (packed,) = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ dequantize_4bit(_bytes(packed), ctx.state).to(grad.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = grad.flatten(0, -2).sum(0)
        return of_x, None, None, of_bias


def _bytes(packed: Tensor) -> Tensor:
    """4-bit values, two in a byte, in the shape that bitsandbytes takes: (out * in / 2, 1)."""
    return packed.view(torch.uint8).view(-1, 1)


class ShardedLinear4bit(Linear4bit):
    """A frozen linear layer whose weight is a plain parameter, (out * in / 2,) bytes, which may be sharded.

    The scales of its blocks, with double quantisation 3% of the packed weight, are whole in every process.

    Attributes:
        compress_statistics: whether the scales are quantised too.
        quant_type: nf4 or fp4.
        source_cls: kind of the layer in its place before, which transformers notes.
    """

    compress_statistics: bool
    quant_type: str
    source_cls: type

    def pack(self, weight: Tensor, device: torch.device, storage: torch.dtype) -> Tensor:
        """The weight in 4 bits, exactly as one process has it; keeps the scales.

        Args:
            weight: as it is stored, (out, in), or (in, out) where transformers has a `Conv1D`.
            device: where it is packed and stays.
            storage: type whose bytes hold two weights each.
        """
        stored = weight.T if issubclass(self.source_cls, Conv1D) else weight
        pieces = stored.contiguous().to(device).flatten().split(_PIECE)
        made = [quantize_4bit(piece, quant_type=self.quant_type) for piece in pieces]
        self.quant_state = state = made[0][1]
        state.shape, state.absmax = stored.shape, torch.cat([each.absmax for _, each in made])
        if self.compress_statistics:  # as `quantize_4bit` does with the scales of a whole weight
            state.offset, state.nested = state.absmax.mean(), True
            state.absmax, state.state2 = quantize_blockwise(state.absmax - state.offset, blocksize=256)
        return torch.cat([packed.flatten() for packed, _ in made]).view(storage)

    def unpack(self, packed: Tensor) -> Tensor:
        """The weight (out, in) that the whole of the packed one stands for, in the type it was stored in."""
        return dequantize_4bit(_bytes(packed), self.quant_state)

    def forward(self, x: Tensor) -> Tensor:
        """X (..., in) to (..., out), computed in the layer's type."""
        inputs = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        return _Linear.apply(inputs, self.weight, self.quant_state, bias).to(x.dtype)


def use_sharded_4bit(model: nn.Module) -> None:
    """Let the 4-bit layers of a model on the meta device have weights that can be sharded."""
    for module in model.modules():
        if type(module) is Linear4bit:
            old: Any = module.weight
            packed = torch.empty(old.numel() // 2, dtype=torch.uint8, device="meta")
            new: Any = nn.Parameter(packed, requires_grad=False)
            module.__class__ = ShardedLinear4bit
            for owner in (module, new):  # peft asks the weight
                owner.compress_statistics, owner.quant_type = old.compress_statistics, old.quant_type
            module.weight = new
