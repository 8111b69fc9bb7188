"""The arithmetic of a merge: tensors in parallel, each streamed block by block, within a bound on memory."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_merge.errors import MergeError
from rlhf_merge.methods.blocks import Inputs, OnBytes, Spaces, check_range, map_tensors, piece, processors
from rlhf_merge.run.plan import MergePlan, TensorJob

_LOADED_LATER = 24_000_000
"""Bytes beside the buffers that a process grows by as it merges: code of libraries that is loaded when it is
first run (12 MB with torch 2.13), threads, what numpy and malloc keep; 15 MB in all were seen."""


Write = Callable[[str, int, Tensor], None]
"""Takes a piece of a tensor, by its name, from an element on; called from any thread."""
Note = Callable[[dict[str, tuple[float, ...]]], None]
"""Takes the coefficients of the tensors that were finished since the last call; called every few seconds."""


@dataclass(frozen=True)
class Resources:
    """Resources that a merge may use.

    Args:
        threads: number of threads; None is one for each processor this process may use.
        max_memory: bytes that the whole process may take; None sets no bound.
    """

    threads: int | None = None
    max_memory: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in vars(self).items():
            if value is not None and value < 1:
                message = f"{name} must be at least 1, got {value}; leave it out to set no bound"
                raise MergeError(message, code="invalid_value", key=name)

    def threads_for(self, plan: MergePlan) -> int:
        """The number of threads whose buffers the memory allows.

        Raises:
            MergeError: not even those of one.
        """
        wanted = self.threads or processors()
        if self.max_memory is None:
            return wanted
        taken, each = expected_bytes(plan, 0), plan.bytes_per_thread
        fitting = (self.max_memory - taken) // max(1, each)
        if fitting < 1:
            message = f"--max-memory allows {self.max_memory // 10**6} MB, Python with torch takes "
            message += f"{taken / 1e6:.0f} MB and one thread {each / 1e6:.0f} MB"
            least = math.ceil((taken + each) / 1e6)
            raise MergeError(
                f"{message}; allow at least {least} MB", code="max_memory_too_small", least=least * 10**6
            )
        return min(wanted, fitting)


def merge_tensors(
    jobs: Sequence[TensorJob],
    write: Write,
    note: Note = lambda finished: None,
    *,
    threads: int,
    on_bytes: OnBytes | None = None,
) -> None:
    """Merge tensors, the largest first; the result does not depend on the number of threads."""
    map_tensors(
        lambda job, spaces, on_read: _merge_one(job, write, spaces, on_read),
        sorted(jobs, key=lambda job: -job.bytes_read),
        threads=threads,
        on_bytes=on_bytes,
        on_results=lambda found: note({job.output.name: coefficients for job, coefficients in found}),
    )


def _merge_one(job: TensorJob, write: Write, spaces: Spaces, on_bytes: OnBytes) -> tuple[float, ...]:
    """Merge one tensor; its coefficients."""
    moved = 0

    def on_read(count: int) -> None:
        nonlocal moved
        on_bytes(count)
        moved += count

    name, dtype = job.output.name, job.output.dtype
    inputs = replace(job.inputs, on_read=on_read)
    if job.method is None:
        for start, end in inputs.ranges():
            values = _copied(inputs, start, end)
            on_read(values.nbytes * len(inputs.all))
            write(name, start, values)
            on_read(values.nbytes)
        return ()
    space = spaces(job.arithmetic)
    step = job.method.fit(inputs, job.values, space)
    for start, end in inputs.ranges(step.row_length):
        merged = step.merge(start, end, space)
        check_range(merged, dtype, name)
        values = torch.empty(end - start, dtype=dtype).copy_(merged)
        write(name, start, values)
        on_read(values.nbytes)
    on_read(job.bytes_read + job.output.nbytes - moved)  # models with the coefficient 0 are not read
    return step.coefficients


def _copied(inputs: Inputs, start: int, end: int) -> Tensor:
    """A piece of a tensor of integers, which must be the same in all models."""
    first = piece(inputs.all[0], start, end)
    for other, label in zip(inputs.all[1:], inputs.labels[1:], strict=True):
        if not torch.equal(piece(other, start, end), first):
            message = f"tensor {inputs.name} holds integers, which cannot be merged, and differs between "
            message += f"{inputs.labels[0]} and {label}; make them equal"
            raise MergeError(message, code="different_integers", tensor=inputs.name)
    return first


def expected_bytes(plan: MergePlan, threads: int) -> int:
    """Memory this process will take for a merge that is about to begin, in bytes."""
    return resident_bytes() + _LOADED_LATER + threads * plan.bytes_per_thread


def resident_bytes() -> int:
    """Memory this process takes now, in bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the most it ever took
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
