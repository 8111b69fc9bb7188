"""Loss and metrics of a micro-batch, and their reduction over micro-batches and processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_models import TokenLogps


@dataclass(frozen=True)
class LossOutput:
    """Loss and statistics of one micro-batch: scalars that add up over micro-batches and processes."""

    loss: Tensor
    """Sum over the micro-batch's terms, with gradient."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics that are sums over terms; reported as means over the step's terms."""
    means: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Metrics that are means over something else: their sums and counts; left out if nothing counts."""
    lows: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics reported as the minimum over micro-batches; inf if there is nothing, left out
    of the metrics where all are."""
    highs: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics reported as the maximum over micro-batches; -inf if there is nothing."""

    def parts(self, real: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Values to sum and values to maximise (minima negated); neutral values where not `real`."""
        added = [self.loss, *self.sums.values(), *(x for pair in self.means.values() for x in pair)]
        highest = [*(-low for low in self.lows.values()), *self.highs.values()]
        if real:
            return added, highest
        return [torch.zeros_like(x) for x in added], [torch.full_like(x, -torch.inf) for x in highest]


def mean_where(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count of the values at which `chosen` (bool, same shape) is true."""
    return values.masked_fill(~chosen, 0).sum(), chosen.sum()


def side_metrics(
    scores: TokenLogps, chosen_tokens: Tensor, rejected_tokens: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Entropy of both sides' tokens and mean logits of each side's, as sums and counts.

    Args:
        scores: scored with statistics.
        chosen_tokens: (M,) bool, which tokens belong to chosen (desirable) completions.
        rejected_tokens: (M,) bool, which belong to rejected (undesirable) ones.
    """
    assert scores.entropy is not None and scores.mean_logits is not None
    return {
        "logits/chosen": mean_where(scores.mean_logits, chosen_tokens),
        "logits/rejected": mean_where(scores.mean_logits, rejected_tokens),
        "entropy": mean_where(scores.entropy, chosen_tokens | rejected_tokens),
    }


def reduce_outputs(
    outputs: Sequence[tuple[LossOutput, bool]],
    total: int,
    *,
    add: Callable[[Tensor], Tensor],
    maximum: Callable[[Tensor], Tensor],
    others: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Metrics over micro-batches and processes as floats, fetched from the device in one transfer.

    `outputs` are pairs of an output and whether it counts; `total` counts the step's terms over all
    processes; `others` are the same on every process.
    """
    others = others or {}
    first = outputs[0][0]
    parts = [output.parts(real) for output, real in outputs]
    added = add(_stacked([added for added, _ in parts]).sum(0))
    highest = _stacked([highest for _, highest in parts])
    highest = maximum(highest.amax(0)) if highest.numel() else added[:0]
    values = torch.cat([added, highest, *(x.detach().to(added).reshape(1) for x in others.values())]).tolist()
    metrics = {"loss": values[0] / total}
    at = 1
    for name in first.sums:
        metrics[name], at = values[at] / total, at + 1
    for name in first.means:
        if count := values[at + 1]:
            metrics[name] = values[at] / count
        at += 2
    for sign, names in ((-1, first.lows), (1, first.highs)):
        for name in names:
            if values[at] > -math.inf:
                metrics[name] = sign * values[at]
            at += 1
    return metrics | dict(zip(others, values[at:], strict=True))


def _stacked(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """(micro-batches, values) in fp64, so that a sum hardly depends on how a step was cut; in fp32 on mps."""
    if not rows[0]:
        return torch.empty(len(rows), 0)
    dtype = torch.float32 if rows[0][0].device.type == "mps" else torch.float64
    return torch.stack([torch.stack([value.detach().to(dtype).reshape(()) for value in row]) for row in rows])
