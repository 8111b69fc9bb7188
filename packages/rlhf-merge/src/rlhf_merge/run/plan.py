"""The plan of a merge, checked before it begins: sources, inputs, parameters and place of every tensor."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError, readable
from rlhf_merge.files.checkpoint import Checkpoint, open_checkpoint
from rlhf_merge.files.config_json import check_architectures, output_config
from rlhf_merge.files.tokenizer import copied_files, read_tokens
from rlhf_merge.files.weights import FLOAT8
from rlhf_merge.files.writer import OutputTensor, Shard, lay_out
from rlhf_merge.methods.blocks import BLOCK, Inputs, Readable, working_dtype
from rlhf_merge.methods.families import METHODS
from rlhf_merge.methods.spec import Method, Values
from rlhf_merge.names import (
    check_present,
    depth_of,
    is_vocabulary_tensor,
    layer_counts,
    layer_name,
    vocabulary_rows,
)
from rlhf_merge.run.matching import check_alike, matched
from rlhf_merge.run.vocab import Alignment, ModelVocab, align, aligned

_INNER = re.compile(r"\.(layers|blocks|block)\.\d+\.")
_NOT_TEXT = re.compile(r"vision|visual|image|audio|speech")
_BEFORE_THE_LAYERS = re.compile(r"(embed|wte|wpe|tok_embeddings|shared\.weight)")

Tensors = Mapping[str, Mapping[str, Readable]]


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the result, what it is made from, and the method's parameters."""

    output: OutputTensor
    method: Method | None
    """None for tensors of integers, which must be equal in all models and are copied."""
    inputs: Inputs
    values: Values

    @property
    def passes(self) -> int:
        """How often its inputs are read."""
        if self.method is None:
            return 1
        ranks = self.method.ranks and any(own["density"] < 1 for own in self.values.per_model)
        return self.method.passes + (self.arithmetic.itemsize // 2 if ranks else 0)

    @property
    def arithmetic(self) -> torch.dtype:
        """The type of the arithmetic."""
        return working_dtype([self.output.dtype, self.inputs.arithmetic])

    @property
    def bytes_read(self) -> int:
        """Bytes of its inputs, counted once for every pass."""
        return self.inputs.nbytes * self.passes

    @property
    def buffer_bytes(self) -> int:
        """Buffers of one thread: a block of every input, the arithmetic's own, numpy's intermediates."""
        row_wise = self.method is not None and self.method.row_wise
        row = max([1, *self.output.shape[-1:]]) if row_wise else 1
        block = max((stop - start for start, stop in self.inputs.ranges(row)), default=0)
        count = len(self.inputs.all) + 8 + (self.method.buffers if self.method else 0)
        return max(block, BLOCK) * self.arithmetic.itemsize * count


@dataclass(frozen=True)
class MergePlan:
    """Everything about a merge but the arithmetic; models go by what the config calls them."""

    config: MergeConfig
    checkpoints: Mapping[str, Checkpoint]
    jobs: tuple[TensorJob, ...]
    shards: tuple[Shard, ...]
    model_config: dict[str, Any]
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
        return max((job.buffer_bytes for job in self.jobs), default=0)

    def identity(self) -> dict[str, Any]:
        """Everything that determines the result's bytes, as plain values: config, input files, layout."""
        from importlib.metadata import version

        found = hashlib.sha256()
        if self.alignment is not None:
            found.update(repr((self.alignment.rows, self.alignment.tokenizer, self.alignment.added)).encode())
            for index in self.alignment.indexes:
                found.update(b"-" if index is None else index.tobytes())
        plain = {
            "version": version("rlhf-merge"),
            "config": self.config.to_dict(),
            "files": {spec: checkpoint.identity for spec, checkpoint in self.checkpoints.items()},
            "shards": [[shard.file, shard.size] for shard in self.shards],
            "model_config": self.model_config,
            "vocabulary": "" if self.alignment is None else found.hexdigest(),
        }
        return json.loads(json.dumps(plain))

    def check_outside(self, out: Path) -> None:
        """Refuse an output folder inside of a model's, which would change what is read."""
        for checkpoint in self.checkpoints.values():
            for folder in (checkpoint.folder, *checkpoint.adapter_folders):
                if folder.resolve() in out.resolve().parents:
                    message = f"output folder {out} is inside of {folder}, which is merged; choose another"
                    raise MergeError(message, code="output_inside_model", path=str(out))

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
    _check_base(config, checkpoints)
    found = matched(checkpoints, config.ignore)
    tensors = found.tensors
    alignment = _align(config, checkpoints, tensors, reference)
    jobs = tuple(make_jobs(config, tensors, reference))
    for output in (job.output for job in jobs if alignment is not None and job.output.shape):
        # An adapter that enlarged an embedding leaves such heads.
        rows = alignment.rows if alignment else 0
        head = layer_name(output.name) is None and is_vocabulary_tensor(output.name, (rows,), rows)
        if head and output.shape[0] != rows:
            message = f"tensor {output.name} would have {output.shape[0]} rows and the embedding {rows}"
            message += "; give each model as many in both"
            raise MergeError(message, code="different_row_counts", tensor=output.name)
    config_from = next((spec for spec in checkpoints if checkpoints[spec].config), reference)
    tokenizer = list(checkpoints)[alignment.tokenizer] if alignment else reference
    copied_files(checkpoints[config_from].folder, checkpoints[tokenizer].tokenizer_folder)  # refuses links
    lent = checkpoints[config_from].config
    ranges = [source.layers for part in config.slices for source in part.sources[:1]]
    totals = Counter[torch.dtype]()
    for job in jobs:
        if job.output.dtype.is_floating_point:
            totals[job.output.dtype] += job.inputs.numel
    commonest = [str(dtype).removeprefix("torch.") for dtype, _ in totals.most_common(1)]
    with readable(f"config.json of {config_from}"):
        model_config = lent and output_config(
            lent,
            dtype=commonest[0] if commonest else None,
            vocab_size=alignment.rows if alignment else None,
            layer_sources=[layer for begin, end in ranges for layer in range(begin, end)] or None,
            tied=found.tied,
            token_ids_from=checkpoints[tokenizer].config if tokenizer != config_from else None,
        )
        if found.named_by and "architectures" in checkpoints[found.named_by].config:
            model_config["architectures"] = checkpoints[found.named_by].config["architectures"]
    return MergePlan(
        config,
        checkpoints,
        jobs,
        tuple(lay_out([job.output for job in jobs], max_shard_size)),
        model_config,
        config_from,
        tokenizer,
        alignment,
        found.ignored,
    )


def make_jobs(config: MergeConfig, tensors: Tensors, reference: str) -> Iterator[TensorJob]:
    """The merge of every tensor; what the config does not say of types, the reference does."""
    for names in source_names(config, tensors, reference):
        inputs = [tensors[spec][name] for spec, name in names.all]
        check_alike([(*place, tensor) for place, tensor in zip(names.all, inputs, strict=True)])
        first, own_names = inputs[0], [name for _, name in names.models]
        values = config.values(names.output, names.depth, names.slice_index, own_names)
        method, dtype, base = None, first.dtype, None
        if dtype.is_floating_point:
            method, base = METHODS[config.method], inputs.pop(0) if names.base else None
            own = tensors[reference].get(names.all[0][1], first).dtype
            dtype = getattr(torch, config.dtype) if config.dtype else torch.bfloat16 if own in FLOAT8 else own
        labels = tuple(spec for spec, _ in names.all)
        merged = Inputs(names.output, base, tuple(inputs), labels, config.seed)
        yield TensorJob(OutputTensor(names.output, tuple(first.shape), dtype), method, merged, values)


def _align(
    config: MergeConfig,
    checkpoints: Mapping[str, Checkpoint],
    tensors: dict[str, dict[str, Readable]],
    reference: str,
) -> Alignment | None:
    """Give the tensors the rows of the result's vocabulary, where the models have one."""
    known = {spec: rows for spec, own in tensors.items() if (rows := vocabulary_rows(own)) is not None}
    specs = list(tensors)
    if len(known) < len(specs):
        if config.vocab is not None:
            lacking = next(spec for spec in specs if spec not in known)
            message = f"vocab is {config.vocab}, but {lacking} has no embedding of tokens; leave it out"
            raise MergeError(message, code="invalid_value", key="vocab")
        return None
    models = [
        ModelVocab(spec, known[spec], read_tokens(checkpoints[spec].tokenizer_folder)) for spec in specs
    ]
    names = dict.fromkeys(
        name
        for spec in (reference, *specs)
        for name, tensor in tensors[spec].items()
        if is_vocabulary_tensor(name, tensor.shape, known[spec])
    )
    embedding = min(names, key=lambda name: "head" in name)
    alignment = align(config.vocab, models, specs.index(reference), tensor=embedding)
    if all(index is None for index in alignment.indexes):
        return alignment
    base = specs.index(config.base) if config.base and METHODS[config.method].base == "required" else None
    for name in names:
        found = aligned(name, [tensors[spec].get(name) for spec in specs], models, alignment, base)
        for spec, tensor in zip(specs, found, strict=True):
            if tensor is not None:
                tensors[spec][name] = tensor
    return alignment


def _check_base(config: MergeConfig, checkpoints: Mapping[str, Checkpoint]) -> None:
    """Refuse a model that is the base under another name; its task vector would be zero."""
    if config.base is None or config.slices or METHODS[config.method].base != "required":
        return
    places = {spec: (one.folder.resolve(), one.adapter_folders) for spec, one in checkpoints.items()}
    for spec, place in places.items():
        if place == places[config.base] and spec != config.base:
            message = f"{spec} is the base {config.base} by another name; leave it out of models"
            raise MergeError(message, code="repeated_model", model=spec)


@dataclass(frozen=True)
class SourceNames:
    """Sources of one tensor of the result."""

    output: str
    depth: float
    """Of its layer, in [0, 1]."""
    base: tuple[str, str] | None
    """The base's spec and the tensor's name there, where the method has a base."""
    models: tuple[tuple[str, str], ...]
    slice_index: int | None = None

    @property
    def all(self) -> tuple[tuple[str, str], ...]:
        """The base, where there is one, and the models."""
        return (self.base, *self.models) if self.base else self.models


def source_names(config: MergeConfig, tensors: Tensors, reference: str) -> Iterator[SourceNames]:
    """Sources of every tensor of the result, in the order of the reference or of the slices."""
    if config.slices:
        yield from _of_slices(config, tensors)
        return
    specs = [entry.model for entry in config.merged()]
    base = config.base if METHODS[config.method].base == "required" else None
    used = [*([base] if base else []), *specs]
    names = dict.fromkeys(name for spec in (reference, *used) for name in tensors[spec])
    check_present(names, used, tensors)
    counts = layer_counts(names)
    for name in names:
        models = tuple((spec, name) for spec in specs)
        yield SourceNames(name, depth_of(name, counts), (base, name) if base else None, models)


def _of_slices(config: MergeConfig, tensors: Tensors) -> Iterator[SourceNames]:
    """The layers of the slices, behind what goes with the first slice and before what goes with the last."""
    model = config.slices[0].sources[0].model
    counts = layer_counts(tensors[model])
    stack = _cut_stack(config.stack, tensors[model], list(counts), model)
    used = dict.fromkeys(source.model for part in config.slices for source in part.sources)
    every = {name: layer_name(name) for spec in used for name in tensors[spec]}
    outside = [name for name, found in every.items() if not found or found.stack != stack]
    check_present(outside, [model], tensors)
    before = [name for name in outside if every[name] or _BEFORE_THE_LAYERS.search(name)]
    for name in before:
        yield _of_slice(config, tensors, 0, name, depth_of(name, counts))
    yield from _layers(config, tensors, stack)
    for name in outside:
        if name not in before:
            yield _of_slice(config, tensors, len(config.slices) - 1, name, 0.0)


def _layers(config: MergeConfig, tensors: Tensors, stack: str) -> Iterator[SourceNames]:
    """The layers of the slices, one after the other."""
    rests: dict[tuple[str, int], list[str]] = {}  # by model and layer, the ends of its tensors' names
    for spec, own in tensors.items():
        for found in filter(None, map(layer_name, own)):
            if found.stack == stack:
                rests.setdefault((spec, found.layer), []).append(found.rest)
    layer = 0
    for index, part in enumerate(config.slices):
        count = part.sources[0].layers[1] - part.sources[0].layers[0]
        for step in range(count):
            places = [(source.model, source.layers[0] + step) for source in part.sources]
            ends = dict.fromkeys(rest for place in places for rest in rests.get(place, ()))
            if not ends:
                message = f"{places[0][0]} has no layer {places[0][1]}; slices[{index}] asks for it"
                raise MergeError(message, code="missing_layer", model=places[0][0], layer=places[0][1])
            depth = step / (count - 1) if count > 1 else 1.0
            for rest in ends:
                own = [f"{stack}{number}{rest}" for _, number in places]
                yield _of_slice(config, tensors, index, f"{stack}{layer}{rest}", depth, own)
            layer += 1


def _of_slice(
    config: MergeConfig,
    tensors: Tensors,
    index: int,
    output: str,
    depth: float,
    names: Sequence[str] | None = None,
) -> SourceNames:
    """A tensor of a slice, by its names in the slice's sources where they are not that of the output."""
    sources, base = config.slices[index].sources, config.slice_base(index)
    places = []
    for source, name in zip(sources, names or [output] * len(sources), strict=True):
        check_present([name], [source.model], tensors)
        places.append((source, (source.model, name)))
    of_base = next((place for source, place in places if source is base), None)
    return SourceNames(output, depth, of_base, tuple(p for source, p in places if source is not base), index)


def _cut_stack(word: str | None, names: Mapping[str, Readable], stacks: Sequence[str], model: str) -> str:
    """The stack of layers that slices cut: the only one, or the one whose name has the word in it."""
    fitting = [stack for stack in stacks if word is None or word in stack]
    if len(fitting) != 1:
        found = ", ".join(stack.rstrip(".") for stack in stacks) or "none"
        how = f"and {word!r} is in the names of {len(fitting)}" if word else "name one as stack in the config"
        message = f"slices cut one stack of layers, but {model} has {len(stacks)} ({found}); {how}"
        raise MergeError(message, code="ambiguous_stack", model=model)
    (stack,) = fitting
    if len(stacks) > 1 and _NOT_TEXT.search(stack):
        message = f"the stack {stack.rstrip('.')} of {model} is not its language model's; cut that one"
        raise MergeError(message, code="unsupported_stack", model=model)
    for name in names:  # stages are of different sizes and have layers of their own
        inner = name.startswith(stack) and _INNER.search(name.removeprefix(stack))
        if inner or (name.startswith(stack) and stack.endswith("stages.")):
            message = f"{model} has layers inside of stages ({name}), which slices cannot move"
            raise MergeError(message, code="layers_in_stages", model=model)
    return stack
