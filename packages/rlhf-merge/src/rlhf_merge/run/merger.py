"""Merging models on disk, or in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.config.settings import Setting
from rlhf_merge.errors import MergeError, UnwrittenError
from rlhf_merge.files.tokenizer import write_model_files
from rlhf_merge.files.writer import PartialModel, check_output, explained, index_of, write_json
from rlhf_merge.methods.blocks import MemoryTensor, OnBytes
from rlhf_merge.methods.families import PARAMETERS
from rlhf_merge.methods.families.linear import linear
from rlhf_merge.names import depth_of, layer_counts
from rlhf_merge.run.card import write_card
from rlhf_merge.run.engine import Resources, merge_tensors
from rlhf_merge.run.matching import without
from rlhf_merge.run.plan import MergePlan, make_jobs, make_plan


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
