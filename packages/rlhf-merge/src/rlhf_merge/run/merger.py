"""Merging models on disk or in memory: tensors in parallel, each block by block, within a bound on memory."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.config.settings import Setting
from rlhf_merge.errors import MergeError, UnwrittenError
from rlhf_merge.files.tokenizer import write_model_files
from rlhf_merge.files.writer import PartialModel, check_output, explained, index_of, write_json
from rlhf_merge.methods.blocks import (
    Inputs,
    MemoryTensor,
    OnBytes,
    Spaces,
    check_range,
    map_tensors,
    piece,
    processors,
)
from rlhf_merge.methods.families import PARAMETERS
from rlhf_merge.methods.families.means import linear
from rlhf_merge.names import depth_of, layer_counts
from rlhf_merge.run.card import write_card
from rlhf_merge.run.matching import without
from rlhf_merge.run.plan import MergePlan, TensorJob, make_jobs, make_plan

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
            least = math.ceil((taken + each) / 1e6)
            message = f"--max-memory allows {self.max_memory // 10**6} MB, Python with torch takes "
            message += f"{taken / 1e6:.0f} MB and one thread {each / 1e6:.0f} MB; allow at least {least} MB"
            raise MergeError(message, code="max_memory_too_small", least=least * 10**6)
        return min(wanted, fitting)


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    Args:
        folder: the model.
        resumed: tensors that an interrupted merge had already finished.
        tensors: number of tensors of the model.
        bytes_written: of its tensors.
        coefficients: for each tensor, how much of each model went into it, where numbers say it.
    """

    folder: Path
    resumed: int
    tensors: int
    bytes_written: int
    coefficients: dict[str, tuple[float, ...]]


class ModelMerger:
    """Merges models as a config says.

    Args:
        config: a `MergeConfig`, its plain values, or a YAML or JSON file of our own schema or of mergekit's.
        resources: threads and memory.
        max_shard_size: bytes of tensors per file of the result.

    Raises:
        MergeError: the config holds a mistake.
    """

    def __init__(
        self,
        config: MergeConfig | Mapping[str, Any] | str | Path,
        *,
        resources: Resources | None = None,
        max_shard_size: int = 5_000_000_000,
    ):
        if isinstance(config, Mapping):
            config = MergeConfig.from_dict(config)
        elif not isinstance(config, MergeConfig):
            config = MergeConfig.from_file(config)
        self.config = config
        self.resources = resources or Resources()
        self.max_shard_size = max_shard_size

    def plan(self) -> MergePlan:
        """Open the models and decide everything but the arithmetic; the caller closes the plan.

        Raises:
            MergeError: the models cannot be read or do not fit together.
        """
        return make_plan(self.config, max_shard_size=self.max_shard_size)

    def merge(
        self,
        out: str | Path,
        *,
        restart: bool = False,
        on_bytes: OnBytes | None = None,
        plan: MergePlan | None = None,
        files: Mapping[str, str] | None = None,
    ) -> MergeResult:
        """Merge into a folder, which appears when it is complete; an interrupted merge is resumed.

        Args:
            out: the folder to make; may exist if it is empty.
            restart: discard what an interrupted merge left.
            on_bytes: called with bytes read and written, `plan.bytes_read + plan.bytes_written` in all; those
                of tensors finished earlier at once.
            plan: of this merge, where the caller has made it; it is closed.
            files: names and contents of further text files to put beside the model.

        Raises:
            MergeError: see `plan` and `merge_tensors`; the output folder is not empty, or inside of a
                model's; no space is left.
        """
        out = Path(out)
        check_output(out)
        # A link to an empty folder stays; what it leads to is replaced.
        out = out.resolve() if out.is_symlink() else out.absolute()
        plan = plan or self.plan()
        partial = None
        try:
            plan.check_outside(out)
            threads = self.resources.threads_for(plan)
            partial = PartialModel(out, plan.shards, plan.identity(), restart=restart)
            resumed = len(partial.finished)
            done = [job for job in plan.jobs if job.output.name in partial.finished]
            rest = [job for job in plan.jobs if job.output.name not in partial.finished]
            if on_bytes is not None and done:
                on_bytes(sum(job.bytes_read + job.output.nbytes for job in done))
            try:
                merge_tensors(rest, partial.write, partial.note, threads=threads, on_bytes=on_bytes)
            finally:
                partial.flush()
            with explained(out):
                _write_small_files(plan, partial.folder, partial.finished)
                for name, text in (files or {}).items():
                    (partial.folder / name).write_text(text, encoding="utf-8")
            partial.publish()
            return MergeResult(out, resumed, len(plan.jobs), plan.bytes_written, partial.finished)
        except MergeError as error:
            if partial is not None and not isinstance(error, UnwrittenError):
                partial.discard()
            raise
        finally:
            if partial is not None:
                partial.close()
            plan.close()

    def merge_state_dicts(self, models: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Merge models in memory.

        Args:
            models: state dicts by what the config calls the models; it has no slices and no vocab.

        Returns:
            The merged state dict, with the base's (or the first model's) types unless the config has a
            dtype.

        Raises:
            MergeError: a model or a tensor is missing, shapes differ, or an input holds NaN or an infinity.
        """
        specs = self.config.model_specs
        if self.config.slices or self.config.vocab:
            message = "slices and vocab are for models on disk; merge_state_dicts takes neither"
            raise MergeError(message, code="unsupported_for_state_dicts")
        for spec in specs:
            if spec not in models:
                message = f"no state dict is given for {spec}; got {', '.join(models) or 'none'}"
                raise MergeError(message, code="missing_state_dict", model=spec)
        every = {spec: {k: MemoryTensor(t.detach()) for k, t in models[spec].items()} for spec in specs}
        tensors, _ = without(every, self.config.ignore)
        jobs = list(make_jobs(self.config, tensors, specs[0]))
        outputs = [job.output for job in jobs]
        merged = {output.name: torch.empty(output.shape, dtype=output.dtype) for output in outputs}

        def write(name: str, element: int, values: Tensor) -> None:
            merged[name].view(-1)[element : element + len(values)] = values

        merge_tensors(jobs, write, threads=self.resources.threads or 1)
        return merged


def _write_small_files(plan: MergePlan, folder: Path, coefficients: dict[str, tuple[float, ...]]) -> None:
    """Everything of the result but the tensors."""
    if len(plan.shards) > 1:
        write_json(folder / "model.safetensors.index.json", index_of(plan.shards, plan.bytes_written))
    write_model_files(
        folder,
        config_from=plan.checkpoints[plan.config_from].folder,
        tokenizer_from=plan.checkpoints[plan.tokenizer].tokenizer_folder,
        config=plan.model_config,
        added_tokens=plan.alignment.added if plan.alignment else None,
    )
    write_card(folder, plan, coefficients)


def layer_wise_interpolation(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], t: Any = 0.5
) -> dict[str, Tensor]:
    """(1-t) a + t b for every tensor of two state dicts, with a t for each layer or kind of tensor.

    Args:
        first: a.
        second: b, with the same tensors.
        t: a number in [0, 1]; a list of numbers, interpolated linearly over the depth (the first holds for
            the first layer and all that is outside of the layers, the last for the last layer); or a mapping
            from parts of tensor names to either, "*" for the rest: `{"self_attn": [0, 1], "mlp": 0.3, "*":
            0.5}`.

    Returns:
        A new state dict; tensors of integers, which must be equal, are the first's.

    Raises:
        MergeError: t is none of these or has no value for a tensor, a tensor is missing or shapes differ.
    """
    setting, counts = Setting.parse(t, PARAMETERS["t"], "t"), layer_counts(first)
    result = {}
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second:
            message = f"tensor {name} is in one of the models only; both must have the same tensors"
            raise MergeError(message, code="missing_tensor", tensor=name)
        a, b = first[name], second[name]
        if a.shape != b.shape:
            message = f"tensor {name} has the shapes {tuple(a.shape)} and {tuple(b.shape)}; make them equal"
            raise MergeError(message, code="different_shapes", tensor=name)
        share = setting.at(name, depth_of(name, counts))
        if share is None:
            message = f"t has no value for tensor {name}; add one for the rest under '*'"
            raise MergeError(message, code="missing_value", key="t")
        if not a.is_floating_point() and not torch.equal(a, b):
            message = f"tensor {name} holds integers that differ, which cannot be interpolated"
            raise MergeError(message, code="different_integers", tensor=name)
        weights = [1 - float(share), float(share)]
        result[name] = linear([a, b], weights) if a.is_floating_point() else a.clone()
    return result


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
