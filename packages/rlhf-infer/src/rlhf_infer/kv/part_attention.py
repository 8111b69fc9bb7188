"""Attention over a part of the keys, with the log-sum-exps that combine parts into the whole softmax."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_FUSED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the CPU's fused kernel, which also takes float64, but rounds it."""
_fused_attention: Callable[..., tuple[Tensor, Tensor]] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
)
"""Kernel of `scaled_dot_product_attention` on CPUs; called directly it returns the log-sum-exps too."""


def mix(
    query: Tensor, key: Tensor, value: Tensor, softcap: float | None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention (*, D) of scaled queries, and the logarithm (*, 1) of the sum of exponentials, in fp32."""
    if softcap is None and query.ndim == 4 and query.device.type == "cpu" and query.dtype in _FUSED:
        mixed, total = _fused_attention(query, key, value, attn_mask=mask, scale=1.0)
        return mixed.float(), total[..., None]
    scores = (query @ key.transpose(-1, -2)).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores += mask
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    return (weights.to(value.dtype) @ value).float() / total, total.log_() + largest
