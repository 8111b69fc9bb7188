"""One optimizer step on micro-batches: the same number of them on every process, one gradient, one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rlhf_algos.engine.loss_output import reduce_outputs
from rlhf_data import PackedBatch, UserError

if TYPE_CHECKING:
    from rlhf_algos.engine.base_trainer import BaseTrainer
    from rlhf_algos.engine.loss_output import LossOutput

__all__ = ["MicroBatch", "Share", "combined", "optimizer_step", "reduced", "share_of_step"]


class MicroBatch(NamedTuple):
    """A packed batch, the examples in it, and whether it counts."""

    batch: PackedBatch
    examples: list[Any]
    real: bool


class Share(NamedTuple):
    """This process's micro-batches of a step, and the terms of the step over all processes."""

    batches: list[MicroBatch]
    total: int


def share_of_step(
    trainer: BaseTrainer[Any], own: Sequence[Any], filler: Callable[[], Sequence[Any]]
) -> Share:
    """Cut this process's examples into micro-batches, as many as every other process has.

    Wrapped modules talk to each other in each pass; a process that has fewer micro-batches repeats one of its
    own that does not count.

    Args:
        trainer: cuts and counts.
        own: this process's examples of the step, may be none.
        filler: examples to repeat where there are none.
    """
    batches = [MicroBatch(batch, rows, True) for batch, rows in trainer.micro_batches(own)]
    terms = sum(trainer.terms(batch, rows) for batch, rows, _ in batches)
    parallel = trainer.parallel
    if parallel.world_size == 1:
        return Share(batches, terms)
    total = int(parallel.sum(torch.tensor([terms], device=trainer.device)))
    most = int(parallel.maximum(torch.tensor([len(batches)], device=trainer.device)))
    spare = batches[:1]
    if not spare and most:
        spare = [MicroBatch(batch, rows, True) for batch, rows in trainer.micro_batches(filler())]
    idle = [MicroBatch(batch, rows, False) for batch, rows, _ in spare[:1]] * (most - len(batches))
    return Share(idle + batches, total)


def optimizer_step(
    trainer: BaseTrainer[Any], share: Share, *, observe: bool = True
) -> tuple[dict[str, float], bool]:
    """Forward, backward, clip and step.

    Args:
        trainer: whose model and optimizer; `prepare` has been called.
        share: what `share_of_step` gave.
        observe: whether the debug switches look at it.

    Returns:
        `loss`, the method's metrics, `grad_norm` and `learning_rate`; and whether the step was taken (fp16
        skips one that overflowed).

    Raises:
        UserError: the loss or the gradient became NaN or infinite; see `BaseTrainer.train_step`.
    """
    parallel, observers = trainer.parallel, trainer.observers if observe else None
    if observers:
        observers.before_step(trainer.step + 1)
    outputs = []
    for number, (batch, rows, real) in enumerate(share.batches, start=1):
        last = number == len(share.batches)
        with parallel.accumulating(last=last):
            output = trainer.loss(batch.to(trainer.device), rows)
            parallel.backward(output.loss * (real / share.total), last=last)
        outputs.append((replace(output, loss=output.loss.detach()), real))
    if observers:
        observers.after_backward(trainer.step + 1, scale=parallel.loss_scale)
    norm = parallel.clip(trainer.parameters)
    metrics = reduced(trainer, outputs, share.total, {} if norm is None else {"grad_norm": norm})
    _check_finite(trainer, metrics)
    metrics["learning_rate"] = trainer.optimizer.param_groups[0]["lr"]
    taken, norm = parallel.step(trainer.stepper)
    if norm is not None:
        metrics["grad_norm"] = float(norm)
        _check_finite(trainer, metrics)
    return metrics, taken


def reduced(
    trainer: BaseTrainer[Any],
    outputs: list[tuple[LossOutput, bool]],
    total: int,
    others: dict[str, torch.Tensor] | None = None,
) -> dict[str, float]:
    """Metrics over micro-batches and processes; see `reduce_outputs`."""
    parallel = trainer.parallel
    return reduce_outputs(outputs, total, add=parallel.sum, maximum=parallel.maximum, others=others)


def combined(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several updates as one: means, but minima of names in `min`, maxima of those in `max`."""
    names = {name: None for each in metrics for name in each}
    found: dict[str, float] = {}
    for name in names:
        values = [each[name] for each in metrics if name in each]
        how = {"min": min, "max": max}.get(name[-3:], lambda values: sum(values) / len(values))
        found[name] = how(values)
    return found


def _check_finite(trainer: BaseTrainer[Any], metrics: dict[str, float]) -> None:
    skipping = trainer.parallel.precision == "fp16"  # an overflow only makes the scaled step be skipped
    names = ("loss",) if skipping else ("loss", "grad_norm")
    if all(math.isfinite(metrics.get(name, 0.0)) for name in names):
        return
    raise UserError(trainer.state.explain_divergence(metrics))
