"""Linear layers on CPUs of which torch's default library, MKL, uses half.

MKL keeps to AVX2 on processors that are not Intel's. oneDNN, which torch has aboard too, uses AVX-512 where
there is any, and is twice as fast there in fp32. Results differ in the last bits.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

_LEAST_PRODUCTS = 1 << 25
"""Fewest multiplications for oneDNN, which needs 0.6 ms to compile a kernel for each new shape."""
_ROUND = 64
"""Rows of which streams are made multiples: oneDNN keeps some 0.4 MB for each new shape, for ever."""
_LOG = logging.getLogger(__name__)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product a bᵀ (n, m) of a (n, k) and b (m, k), by the faster library; not differentiable."""
    return _onednn(a, b) if _worthwhile(a, b) else a @ b.T


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the product a bᵀ to a total (n, m), in place where its type allows; not differentiable."""
    if total.dtype != a.dtype or _worthwhile(a, b):
        return total.add_(product(a, b))
    return total.addmm_(a, b.T)


def rounding(rows: int, like: Tensor) -> int:
    """Rows to add to the rows of a model's states, so that few shapes occur where each one costs memory.

    They are added where oneDNN serves even the square layers of a model, which are its smallest.
    """
    costly = _mkl_is_slow() and like.device.type == "cpu" and like.dtype == torch.float32
    return -rows % _ROUND if costly and rows * like.shape[-1] ** 2 >= _LEAST_PRODUCTS else 0


def use_fast_linears(model: nn.Module) -> None:
    """Let the model's linear layers use oneDNN where it is faster; parameters and names stay; idempotent."""
    if _mkl_is_slow():
        for module in model.modules():
            module.__class__ = _FAST.get(type(module), type(module))


class _Linear(torch.autograd.Function):
    """x wᵀ + b for x (..., in), w (out, in), b (out,) or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return (
            _onednn(grad, weight.T) if ctx.needs_input_grad[0] else None,
            _onednn(rows.T, x.flatten(0, -2).T) if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


class FastLinear(nn.Linear):
    """A linear layer that takes the faster library."""

    def forward(self, input: Tensor) -> Tensor:
        """As of `nn.Linear`."""
        if _worthwhile(input, self.weight):
            return _Linear.apply(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


class _FastConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        if _worthwhile(x, self.weight.T):
            return _Linear.apply(x, self.weight.T, self.bias)
        return super().forward(x)


_FAST: dict[type, type] = {nn.Linear: FastLinear, Conv1D: _FastConv1D}


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _worthwhile(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # the compiler cannot look into oneDNN's operator
        and _mkl_is_slow()
        and x.numel() * len(weight) >= _LEAST_PRODUCTS
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, weight))
        and type(weight) in (nn.Parameter, Tensor)  # a sharded weight is another class
        and not hasattr(weight, "ds_id")  # see `partitioned_linear`
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def _mkl_is_slow() -> bool:
    info = Path("/proc/cpuinfo")
    slow = (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and info.exists()
        and "GenuineIntel" not in info.read_text()
    )
    if slow:
        _LOG.info("fp32 linear layers on the CPU use oneDNN: MKL has no AVX-512 path for this processor")
    return slow
