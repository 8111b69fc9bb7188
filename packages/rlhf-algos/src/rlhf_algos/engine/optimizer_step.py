"""One optimizer step: its examples, equally many micro-batches on every process, one gradient, one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rlhf_algos.checkpoints.manager import CheckpointManager
from rlhf_algos.engine.loss_output import LossOutput, reduce_outputs
from rlhf_algos.engine.observers import Observers
from rlhf_algos.engine.trained_module import TrainedModule
from rlhf_algos.parallel.parallel import Parallel
from rlhf_algos.safeguards.consolidation import ElasticWeightConsolidation
from rlhf_algos.tracking.debug import nonfinite_message
from rlhf_data import PackedBatch, UserError


class MicroBatch(NamedTuple):
    """A packed batch, the examples in it, and whether it counts."""

    batch: PackedBatch
    examples: list[Any]
    real: bool


class Share(NamedTuple):
    """This process's micro-batches of a step, and the terms of the step over all processes."""

    batches: list[MicroBatch]
    total: int


def epoch_order(num_examples: int, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
    """Order of the examples in an epoch; it depends on its arguments only."""
    if not shuffle:
        return list(range(num_examples))
    return torch.randperm(num_examples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def share_of_step(
    own: Sequence[Any],
    filler: Callable[[], Sequence[Any]],
    cut: Callable[[Sequence[Any]], Iterable[tuple[PackedBatch, list[Any]]]],
    num_loss_terms: Callable[[PackedBatch, Sequence[Any]], int],
    parallel: Parallel,
) -> Share:
    """Cut this process's examples into micro-batches, as many as every other process has.

    DDP and FSDP run a collective in every pass; a process that has fewer micro-batches repeats one of its
    own, without counting it.
    """
    batches = [MicroBatch(batch, rows, True) for batch, rows in cut(own)]
    count = sum(num_loss_terms(batch, rows) for batch, rows, _ in batches)
    if parallel.world_size == 1:
        return Share(batches, count)
    total = int(parallel.sum(torch.tensor([count], device=parallel.device)))
    most = int(parallel.maximum(torch.tensor([len(batches)], device=parallel.device)))
    spare = batches[:1]
    if not spare and most:
        spare = [MicroBatch(batch, rows, True) for batch, rows in cut(filler())]
    idle = [MicroBatch(batch, rows, False) for batch, rows, _ in spare[:1]] * (most - len(batches))
    return Share(idle + batches, total)


def optimizer_step(
    trained: TrainedModule,
    share: Share,
    loss: Callable[[PackedBatch, Sequence[Any]], LossOutput],
    *,
    step: int,
    check: Callable[[dict[str, float]], None],
    observers: Observers | None = None,
    held: ElasticWeightConsolidation | None = None,
) -> tuple[dict[str, float], bool]:
    """Forward, backward, clip and step.

    Steps count from 1; `check` raises where the metrics, looked at before the step, are not finite; `held`
    adds the gradient of its penalty.

    Returns:
        `loss`, the method's metrics, `grad_norm` and `learning_rate`; and whether the step was taken (fp16
        skips one that overflowed).
    """
    parallel = trained.parallel
    if observers:
        observers.before_step(step)
    outputs = []
    for number, (batch, rows, real) in enumerate(share.batches, start=1):
        last = number == len(share.batches)
        with parallel.accumulating(last=last):
            output = loss(batch.to(parallel.device), rows)
            parallel.backward(output.loss * (real / share.total), last=last)
        outputs.append((replace(output, loss=output.loss.detach()), real))
    if observers:
        observers.after_backward(step, scale=parallel.loss_scale)
    penalty = held.add_gradient(scale=parallel.loss_scale) if held else {}
    norm = parallel.clip(trained.parameters)
    metrics = reduced(outputs, share.total, parallel, {} if norm is None else {"grad_norm": norm}) | penalty
    check(metrics)
    metrics["learning_rate"] = trained.optimizer.param_groups[0]["lr"]
    taken, norm = trained.step()
    if norm is not None:
        metrics["grad_norm"] = float(norm)
        check(metrics)
    return metrics, taken


def check_finite(
    trained: TrainedModule,
    step: int,
    rows: Sequence[int],
    checkpoints: CheckpointManager | None,
    metrics: Mapping[str, float],
) -> None:
    """Refuse a loss or a gradient that is not finite, naming the rows of the step."""
    skipping = trained.parallel.precision == "fp16"  # an overflow only makes the scaled step be skipped
    names = ("loss",) if skipping else ("loss", "grad_norm")
    if all(math.isfinite(metrics.get(name, 0.0)) for name in names):
        return
    said = nonfinite_message(
        dict(metrics),
        step=step,
        rows=rows,
        checkpoint=checkpoints.latest() if checkpoints else None,
        learning_rate=trained.optimizer.param_groups[0]["lr"],
    )
    raise UserError(said, code="non_finite_loss")


def reduced(
    outputs: list[tuple[LossOutput, bool]],
    total: int,
    parallel: Parallel,
    others: dict[str, torch.Tensor] | None = None,
) -> dict[str, float]:
    """Metrics over micro-batches and processes; see `reduce_outputs`."""
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
