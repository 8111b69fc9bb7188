"""Linear layers whose weights DeepSpeed gathers for a pass and takes away after it.

torch's own keep a transposed view of the weight for the backward pass, and with it the gathered weight that
DeepSpeed replaces in the parameter: by the end of a forward pass a process would hold the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear

from rlhf_models.kernels.cpu_linear import FastLinear


class _Linear(torch.autograd.Function):
    """x wᵀ + b for x (..., in), w (out, in), b (out,) or None; keeps the parameter w, not what it holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return (
            grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None,
            rows.T @ x.flatten(0, -2).to(grad.dtype) if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


class _PartitionedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return _Linear.apply(input, self.weight, self.bias)


_PLAIN = (nn.Linear, FastLinear, _PartitionedLinear)


def use_partitioned_linears(model: nn.Module) -> None:
    """Let the model's linear layers keep no gathered weights; parameters and names stay; idempotent."""
    for module in model.modules():
        if type(module) in _PLAIN:
            module.__class__ = _PartitionedLinear


def is_linear(module: Any) -> bool:
    """Whether a module is a plain linear layer, changed by functions of this package or sharded or not."""
    kind = type(module)
    if issubclass(kind, FSDPModule):
        kind = kind.__bases__[1]
    return kind in _PLAIN
