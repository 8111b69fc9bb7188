"""Language-model head and log-softmax as one differentiable function, without the logits of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_models.kernels.cpu_linear import add_product, product


@dataclass(frozen=True)
class HeadTargets:
    """The tokens to score, and the rows that predict them.

    Args:
        ids: (M,) token ids.
        rows: (M,) which row of the hidden states predicts each.
        num_rows: rows of the hidden states.
        rows_per_chunk: rows whose logits exist at a time.
    """

    ids: Tensor
    rows: Tensor
    num_rows: int
    rows_per_chunk: int

    @property
    def whole(self) -> bool:
        """Whether all rows make one chunk."""
        return self.num_rows <= self.rows_per_chunk

    @cached_property
    def _members(self) -> tuple[Tensor, ...]:
        """The targets of each chunk, by index; counted once, because the host waits for a GPU to count."""
        rows, order = self.rows.sort(stable=True)
        chunks = -(-self.num_rows // self.rows_per_chunk)
        return order.split(torch.bincount(rows // self.rows_per_chunk, minlength=chunks).tolist())

    def chunks(self) -> Iterator[tuple[slice, Tensor | slice, Tensor, Tensor]]:
        """Per chunk: its rows; the targets it predicts, by index, by row within the chunk, and by id."""
        if self.whole:
            yield slice(0, self.num_rows), slice(None), self.rows, self.ids
            return
        starts = range(0, self.num_rows, self.rows_per_chunk)
        for start, members in zip(starts, self._members, strict=True):
            chunk = slice(start, start + self.rows_per_chunk)
            yield chunk, members, self.rows[members] - start, self.ids[members]


class FusedHead(torch.autograd.Function):
    """Scores of targets from hidden states h (R, hidden) and the head's weight W (V, hidden).

    z = scale · h Wᵀ, p = softmax(z), logps = z[y] - logsumexp(z), entropy = -Σ p log p. With upstream
    gradients g of the logps and e of the entropies, summed per row to G and E:

        dz = Σ g · onehot(y) - (G + E · entropy) · p - E · p log p

    Where the rows make one chunk, p is kept for the backward pass, else computed again there. Sums of W's
    gradient over chunks are taken in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: HeadTargets,
        scale: float,
        with_entropy: bool,
        with_stats: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(M,) logps, entropy if either flag is set, and correct and mean of z if `with_stats` is.

        The entropy is differentiable if `with_entropy` is set. Half-precision states are scored in fp32.
        """
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logps = hidden.new_empty(len(targets.ids), dtype=dtype)
        entropy = torch.empty_like(logps) if with_entropy or with_stats else None
        correct = torch.empty_like(logps, dtype=torch.bool) if with_stats else None
        mean_logits = torch.empty_like(logps) if with_stats else None
        kept: list[Tensor] = []
        for chunk, members, row, ids in targets.chunks():
            logits = _logits(hidden[chunk], weight, scale)
            probabilities = logits.softmax(-1)
            highest, likeliest = logits.max(-1) if with_stats else (logits.amax(-1), None)
            log_sum = (
                highest - probabilities.amax(-1).log()
            )  # the largest p is at least 1 / V: nothing is lost
            logps[members] = logits[row, ids] - log_sum[row]
            if entropy is not None:
                entropy[members] = (log_sum - torch.linalg.vecdot(probabilities, logits))[row]
            if correct is not None and mean_logits is not None and likeliest is not None:
                correct[members] = likeliest[row] == ids
                mean_logits[members] = logits.mean(-1)[row]
            if targets.whole and any(ctx.needs_input_grad[:2]):
                kept.append(probabilities)
        ctx.save_for_backward(hidden, weight, *kept)
        ctx.targets, ctx.scale = targets, scale
        ctx.set_materialize_grads(False)
        constants = (None if with_entropy else entropy, correct, mean_logits)
        ctx.mark_non_differentiable(*(constant for constant in constants if constant is not None))
        return logps, entropy, correct, mean_logits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states and weight."""
        hidden, weight, *kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight: Tensor | None = None
        for chunk, members, row, ids in ctx.targets.chunks():
            probabilities = kept[0] if kept else _logits(hidden[chunk], weight, ctx.scale).softmax(-1)
            gradients = [None if g is None else g[members] * ctx.scale for g in (grad_logps, grad_entropy)]
            grad_logits = _grad_logits(probabilities, row, ids, *gradients).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = product(grad_logits, weight.T)
            if ctx.needs_input_grad[1]:
                grad_weight = _accumulated(grad_weight, grad_logits, hidden[chunk], ctx.targets.whole)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    logits = product(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if scale == 1.0 else logits.mul_(scale)


def _grad_logits(
    probabilities: Tensor, row: Tensor, ids: Tensor, grad_logps: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """The `dz` of `FusedHead`, (rows, V)."""

    def per_row(gradient: Tensor) -> Tensor:
        return gradient.new_zeros(len(probabilities)).index_add_(0, row, gradient)[:, None]

    factor = torch.zeros_like(probabilities[:, :1])
    if grad_logps is not None:
        factor -= per_row(grad_logps)
    if grad_entropy is None:
        grad = probabilities * factor
    else:
        terms = torch.special.entr(probabilities)
        upstream = per_row(grad_entropy)
        grad = probabilities * (factor - upstream * terms.sum(-1, keepdim=True)) + upstream * terms
    if grad_logps is not None:
        grad.view(-1).index_add_(0, row * grad.shape[1] + ids, grad_logps)
    return grad


def _accumulated(total: Tensor | None, grad_logits: Tensor, hidden: Tensor, whole: bool) -> Tensor:
    """The weight's gradient with one more chunk in it."""
    if whole:
        return product(grad_logits.T, hidden.T)
    if total is None:
        return product(grad_logits.T, hidden.T).to(torch.promote_types(hidden.dtype, torch.float32))
    return add_product(total, grad_logits.T, hidden.T)
