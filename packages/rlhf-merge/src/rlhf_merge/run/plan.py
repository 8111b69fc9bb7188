"""What a merge will do, decided and checked before it begins: every tensor's inputs, parameters and place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError, damaged
from rlhf_merge.files.checkpoint import Checkpoint, open_checkpoint
from rlhf_merge.files.config_json import check_architectures, output_config
from rlhf_merge.files.float8 import FLOAT8
from rlhf_merge.files.small_files import copied_files, read_tokens
from rlhf_merge.files.writer import OutputTensor, Shard, lay_out
from rlhf_merge.methods.blocks import BLOCK, Inputs, working_dtype
from rlhf_merge.methods.catalog import METHODS
from rlhf_merge.methods.spec import Values
from rlhf_merge.names.tensor_names import SourceNames, layer_name, source_names
from rlhf_merge.run.matching import check_alike, matched
from rlhf_merge.tensors import Readable
from rlhf_merge.vocab.aligned import aligned
from rlhf_merge.vocab.union import Alignment, ModelVocab, align, is_vocabulary_tensor, vocabulary_rows

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
"""Types by the names that configs give them."""

COPY = "copy"
"""The method of tensors of integers, which must be equal in all models."""


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the result, what it is made from, and the method's parameters."""

    output: OutputTensor
    method: str
    """A key of `METHODS`, or `COPY`."""
    inputs: Inputs
    values: Values

    @property
    def passes(self) -> int:
        """How often its inputs are read."""
        if self.method == COPY:
            return 1
        method = METHODS[self.method]
        ranks = method.ranks and any(own["density"] < 1 for own in self.values.per_model)
        return method.passes + (self.arithmetic.itemsize // 2 if ranks else 0)

    @property
    def arithmetic(self) -> torch.dtype:
        """The type of the arithmetic."""
        return working_dtype([self.output.dtype, self.inputs.arithmetic])

    @property
    def bytes_read(self) -> int:
        """Bytes of its inputs, counted once for every pass."""
        return self.inputs.nbytes * self.passes


@dataclass(frozen=True)
class MergePlan:
    """Everything about a merge but the arithmetic.

    Args:
        config: what is merged, and how.
        checkpoints: the models by what the config calls them.
        jobs: the tensors of the result, in the order they are written in.
        shards: the files of the result.
        model_config: config.json of the result.
        reference: the base, or the first model.
        config_from: the model whose config the result has: the reference, unless it has none.
        tokenizer: the model whose tokenizer the result has.
        alignment: of the vocabularies, where the models have any.
        ignored: names of the tensors that the config leaves out of the result.
    """

    config: MergeConfig
    checkpoints: Mapping[str, Checkpoint]
    jobs: tuple[TensorJob, ...]
    shards: tuple[Shard, ...]
    model_config: dict[str, Any]
    reference: str
    config_from: str
    tokenizer: str
    alignment: Alignment | None
    ignored: tuple[str, ...] = ()

    @cached_property
    def bytes_read(self) -> int:
        """Bytes that will be read, counted as often as they are read."""
        return sum(job.bytes_read for job in self.jobs)

    @cached_property
    def bytes_written(self) -> int:
        """Bytes of the result's tensors."""
        return sum(job.output.nbytes for job in self.jobs)

    @property
    def parameters(self) -> int:
        """Number of elements of the result."""
        return sum(job.inputs.numel for job in self.jobs)

    @cached_property
    def bytes_per_thread(self) -> int:
        """Bytes of the buffers that a thread needs for the largest of its blocks."""
        return max((_buffer_bytes(job) for job in self.jobs), default=0)

    def identity(self) -> dict[str, Any]:
        """What the result's bytes depend on, as plain values: the config, the files read, the layout."""
        from importlib.metadata import version

        files = {spec: checkpoint.identity for spec, checkpoint in self.checkpoints.items()}
        plain = {
            "version": version("rlhf-merge"),
            "config": self.config.to_dict(),
            "files": files,
            "shards": [[shard.file, shard.size] for shard in self.shards],
            "model_config": self.model_config,
            "vocabulary": _digest(self.alignment),
        }
        return json.loads(json.dumps(plain))

    def check_outside(self, out: Path) -> None:
        """Refuse an output folder inside of a model's, which would change what is read."""
        for checkpoint in self.checkpoints.values():
            for folder in (checkpoint.folder, *checkpoint.adapter_folders):
                if folder.resolve() in out.resolve().parents:
                    raise MergeError(
                        f"output folder {out} is inside of {folder}, which is merged; choose one elsewhere",
                        code="output_inside_model",
                    )

    def close(self) -> None:
        """Close the models."""
        for checkpoint in self.checkpoints.values():
            checkpoint.close()


def make_plan(config: MergeConfig, *, max_shard_size: int = 5_000_000_000) -> MergePlan:
    """Open the models, check that they fit together, and decide every tensor's merge."""
    with ExitStack() as opened:
        checkpoints = {spec: opened.enter_context(open_checkpoint(spec)) for spec in config.model_specs}
        plan = _plan(config, checkpoints, max_shard_size)
        opened.pop_all()  # the plan closes them
    return plan


def _plan(config: MergeConfig, checkpoints: dict[str, Checkpoint], max_shard_size: int) -> MergePlan:
    reference = config.model_specs[0]
    configs = [(spec, checkpoint.config) for spec, checkpoint in checkpoints.items()]
    check_architectures(configs, same_layers=not config.slices)
    config_from = next((spec for spec in checkpoints if checkpoints[spec].config), reference)
    _check_base(config, checkpoints)
    found = matched(checkpoints, config.ignore)
    alignment, tensors = _aligned(config, checkpoints, found.tensors, reference)
    jobs = tuple(
        job_of(config, names, tensors, reference) for names in source_names(config, tensors, reference)
    )
    if alignment is not None:
        _check_heads(jobs, alignment.rows)
    shards = tuple(lay_out([job.output for job in jobs], max_shard_size))
    sources = [(s.model, s.layers) for part in config.slices for s in part.sources[:1]]
    layer_sources = [layer for _, (begin, end) in sources for layer in range(begin, end)] or None
    tokenizer = list(checkpoints)[alignment.tokenizer] if alignment else reference
    copied_files(checkpoints[config_from].folder, checkpoints[tokenizer].tokenizer_folder)  # refuses links
    lent = checkpoints[config_from].config
    with damaged(f"config.json of {config_from}"):
        model_config = lent and output_config(
            lent,
            dtype=_written_dtype(jobs),
            vocab_size=alignment.rows if alignment else None,
            layer_sources=layer_sources,
            tied=found.tied,
            token_ids_from=checkpoints[tokenizer].config if tokenizer != config_from else None,
        )
        if found.named_by and "architectures" in checkpoints[found.named_by].config:
            model_config["architectures"] = checkpoints[found.named_by].config["architectures"]
    return MergePlan(
        config=config,
        checkpoints=checkpoints,
        jobs=jobs,
        shards=shards,
        model_config=model_config,
        reference=reference,
        config_from=config_from,
        tokenizer=tokenizer,
        alignment=alignment,
        ignored=found.ignored,
    )


def job_of(
    config: MergeConfig, names: SourceNames, tensors: Mapping[str, Mapping[str, Readable]], reference: str
) -> TensorJob:
    """The merge of one tensor."""
    specs = [spec for spec, _ in names.all]
    inputs = [tensors[spec][name] for spec, name in names.all]
    check_alike([(*place, tensor) for place, tensor in zip(names.all, inputs, strict=True)])
    first = inputs[0]
    labels = tuple(specs)
    own = tensors[reference].get(names.all[0][1], first)
    values = config.values(names.output, names.depth, names.slice_index, [name for _, name in names.models])
    if not first.dtype.is_floating_point:
        output = OutputTensor(names.output, tuple(first.shape), first.dtype)
        return TensorJob(output, COPY, Inputs(names.output, None, tuple(inputs), labels), values)
    dtype = DTYPES[config.dtype] if config.dtype else torch.bfloat16 if own.dtype in FLOAT8 else own.dtype
    base = inputs[0] if names.base else None
    models = tuple(inputs[1:] if names.base else inputs)
    return TensorJob(
        OutputTensor(names.output, tuple(first.shape), dtype),
        config.method,
        Inputs(names.output, base, models, labels, config.seed),
        values,
    )


def _aligned(
    config: MergeConfig,
    checkpoints: Mapping[str, Checkpoint],
    tensors: dict[str, dict[str, Readable]],
    reference: str,
) -> tuple[Alignment | None, dict[str, dict[str, Readable]]]:
    """The tensors with the rows of the result's vocabulary."""
    rows = {spec: vocabulary_rows(own) for spec, own in tensors.items()}
    known = {spec: count for spec, count in rows.items() if count is not None}
    if len(known) < len(rows):
        if config.vocab is not None:
            missing = next(spec for spec, count in rows.items() if count is None)
            raise MergeError(
                f"vocab is {config.vocab}, but {missing} has no embedding of tokens; leave it out",
                code="invalid_value",
            )
        return None, tensors
    vocabularies = [
        ModelVocab(spec, count, read_tokens(checkpoints[spec].tokenizer_folder))
        for spec, count in known.items()
    ]
    specs = list(known)
    named = [
        name
        for name, own in tensors[reference].items()
        if is_vocabulary_tensor(name, own.shape, known[reference])
    ]
    embedding = min(named, key=lambda name: "head" in name)
    alignment = align(config.vocab, vocabularies, specs.index(reference), tensor=embedding)
    if all(index is None for index in alignment.indexes):
        return alignment, tensors
    base = specs.index(config.base) if config.base and METHODS[config.method].base == "required" else None
    names = {
        name
        for spec, own in tensors.items()
        for name, tensor in own.items()
        if is_vocabulary_tensor(name, tensor.shape, known[spec])
    }
    for name in names:
        found = aligned(name, [tensors[spec].get(name) for spec in specs], vocabularies, alignment, base)
        for spec, tensor in zip(specs, found, strict=True):
            if tensor is not None:
                tensors[spec][name] = tensor
    return alignment, tensors


def _check_base(config: MergeConfig, checkpoints: Mapping[str, Checkpoint]) -> None:
    """Refuse a model that is the base under another name; its task vector would be zero."""
    if config.base is None or config.slices or METHODS[config.method].base != "required":
        return
    base = checkpoints[config.base]
    for spec, checkpoint in checkpoints.items():
        same = (checkpoint.folder.resolve(), checkpoint.adapter_folders) == (
            base.folder.resolve(),
            base.adapter_folders,
        )
        if same and spec != config.base:
            raise MergeError(
                f"{spec} is the base {config.base} by another name; leave it out of models",
                code="repeated_model",
            )


def _digest(alignment: Alignment | None) -> str:
    """A fingerprint of how the vocabularies are aligned."""
    if alignment is None:
        return ""
    found = hashlib.sha256(repr((alignment.rows, alignment.tokenizer, alignment.added)).encode())
    for index in alignment.indexes:
        found.update(b"-" if index is None else index.tobytes())
    return found.hexdigest()


def _check_heads(jobs: Sequence[TensorJob], rows: int) -> None:
    """Refuse a head with other rows than the embedding; an adapter that enlarged one leaves such heads."""
    for job in jobs:
        name, shape = job.output.name, job.output.shape
        named = layer_name(name) is None and is_vocabulary_tensor(name, (rows,), rows)
        if named and shape and shape[0] != rows:
            raise MergeError(
                f"tensor {name} would have {shape[0]} rows and the embedding {rows}; give each model as "
                "many in both"
            )


def _written_dtype(jobs: Sequence[TensorJob]) -> str | None:
    """The type of most of the result's elements."""
    totals: dict[str, int] = {}
    for job in jobs:
        if job.output.dtype.is_floating_point:
            name = str(job.output.dtype).removeprefix("torch.")
            totals[name] = totals.get(name, 0) + job.inputs.numel
    return max(totals, key=lambda name: totals[name]) if totals else None


def _buffer_bytes(job: TensorJob) -> int:
    """Buffers of one thread: a block of every input, the arithmetic's own, numpy's intermediates."""
    block = max((stop - start for start, stop in job.inputs.ranges(_row(job))), default=0)
    count = len(job.inputs.all) + 8 + (METHODS[job.method].buffers if job.method != COPY else 0)
    return max(block, BLOCK) * job.arithmetic.itemsize * count


def _row(job: TensorJob) -> int:
    row_wise = job.method != COPY and METHODS[job.method].row_wise
    return max(1, job.output.shape[-1]) if row_wise and job.output.shape else 1
