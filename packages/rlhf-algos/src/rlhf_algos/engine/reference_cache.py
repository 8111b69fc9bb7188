"""Reference log-probs of examples, computed once and kept on disk by what they were computed from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlhf_algos.engine.optimizer_step import share_of_step
from rlhf_algos.engine.step_examples import is_streamed
from rlhf_algos.parallel.parallel import Parallel
from rlhf_data import PackedBatch, TokenSequence, atomic_folder, cache_folder

_LOG = logging.getLogger(__name__)
_FILE = "ref_logps.safetensors"
MicroBatches = Callable[
    [Sequence[Any], Callable[[Any], Sequence[TokenSequence]]], Iterator[tuple[PackedBatch, list[Any]]]
]
"""Cuts examples, of which the second argument gives the sequences; each batch with the examples in it."""
_NAMES_ONLY = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Entries of a model's config that say nothing about what it computes (its tensors carry their dtype)."""


class Reference(NamedTuple):
    """A reference, and how a process computes its log-probs of its share of the examples."""

    scorer: nn.Module
    trained: bool
    """Whether the scorer's weights are those that are trained, and so perhaps sharded."""
    adapters_off: bool
    """Whether its adapters change nothing, so that they are left out of the key of the cache."""
    parallel: Parallel
    rows_per_batch: int
    """Examples that a process cuts into micro-batches together."""
    micro_batches: MicroBatches


def with_reference_logps(
    reference: Reference,
    sets: Iterable[Any],
    sequences: Callable[[Any], Sequence[TokenSequence]],
    fields: Sequence[str],
) -> list[Sequence[Any]]:
    """Add the reference's log-probs to sets of examples, from the cache or computed now.

    `sequences` gives what the reference scores of an example, as many as there are `fields`, which get the
    log-probs.  Every process must call it.
    """
    lm: Any = reference.scorer.lm
    parallel = reference.parallel
    tensors = parallel.whole_values(lm) if reference.trained else lm.state_dict().items()
    model = model_hash(lm.config, tensors, without="lora_" if reference.adapters_off else None)
    found: list[Sequence[Any]] = []
    for rows in sets:
        if not len(rows):
            found.append(rows)
            continue
        shape = (len(rows), len(fields))
        data = rows.fingerprint if is_streamed(rows) else data_hash(sequences(row) for row in rows)
        key = hashlib.sha256(f"{model} {parallel.precision} {data}".encode()).hexdigest()
        values = load_logps(key, shape)
        missing = torch.tensor([float(values is None)], device=parallel.device)
        if float(parallel.sum(missing)) or values is None:
            _LOG.info("computing the reference's log-probabilities of %d rows, once", len(rows))
            values = compute_logps(reference, rows, sequences, shape)
            if parallel.is_main:
                save_logps(key, values)
            parallel.wait()
        found.append((_StreamReferenced if is_streamed(rows) else _Referenced)(rows, values, fields))
    return found


@torch.no_grad()
def compute_logps(
    reference: Reference,
    rows: Any,
    sequences: Callable[[Any], Sequence[TokenSequence]],
    shape: tuple[int, int],
) -> Tensor:
    """Log-probs (rows, sequences of a row) under the reference; every process scores a share of the rows."""
    scorer, parallel, size = reference.scorer, reference.parallel, reference.rows_per_batch
    values = torch.zeros(shape, device=parallel.device)
    was_training = scorer.training
    scorer.eval()
    if not parallel.shards_weights:
        scorer.to(parallel.device)

    def cut(members: Sequence[tuple[int, Any]]) -> Iterator[tuple[PackedBatch, list[Any]]]:
        return reference.micro_batches(members, lambda pair: sequences(pair[1]))

    for first in range(0, len(rows), size * parallel.world_size):
        start = first + parallel.rank * size
        own = _numbered(rows, range(start, min(start + size, len(rows))))
        share = share_of_step(own, lambda: _numbered(rows, range(1)), cut, lambda *_: 0, parallel)
        for batch, members, real in share.batches:
            batch = batch.to(parallel.device)
            with contextlib.nullcontext() if parallel.shards_weights else parallel.autocast():
                logps = batch.sequence_sums(scorer(batch).logps)
            if real:
                values[[index for index, _ in members]] = logps.view(len(members), -1).float()
    scorer.train(was_training)
    return parallel.sum(values).cpu()


def adapter_off_is(model: Any) -> bool:
    """Whether a model equals itself with its adapters off, because their update is still zero."""
    if not hasattr(model, "disable_adapter"):
        return False
    updates = [p for name, p in model.named_parameters() if "lora_B" in name or "lora_embedding_A" in name]
    return not any(bool(update.count_nonzero()) for update in updates)


def model_hash(
    config: PreTrainedConfig, tensors: Iterable[tuple[str, Any]], *, without: str | None = None
) -> str:
    """SHA-256 over a model's config and the names, types and values of its tensors.

    Takes the model's config and its tensors by name, in any order; tensors with `without` in their name are
    left out, such as those of an adapter that is off.
    """
    values = {key: value for key, value in config.to_dict().items() if key not in _NAMES_ONLY}
    lines = [json.dumps(values, sort_keys=True, default=str)]
    for name, tensor in tensors:
        if isinstance(tensor, Tensor) and not (without and without in name):
            content = hashlib.sha256(_bytes(tensor)).hexdigest()
            lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def data_hash(rows: Iterable[Iterable[TokenSequence]]) -> str:
    """SHA-256 over token ids and scored positions, and so over texts, tokenizer and chat template."""
    digest = hashlib.sha256()
    for row in rows:
        for sequence in row:
            for numbers in (sequence.input_ids, sequence.scored()):
                digest.update(len(numbers).to_bytes(8, "little"))
                digest.update(array("q", numbers).tobytes())
        digest.update(b"row")
    return digest.hexdigest()


def load_logps(key: str, shape: tuple[int, int]) -> Tensor | None:
    """Read what `save_logps` wrote under a key; None if it is missing or incomplete."""
    path = cache_folder("reference") / key / _FILE
    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            values, header = file.get_tensor("ref_logps"), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        _LOG.warning("%s is damaged (%s) and will be made again", path, error)
        return None
    if tuple(values.shape) != shape or header != _header(values):
        _LOG.warning("%s does not hold what was written and will be made again", path)
        return None
    _LOG.info("reference log-probabilities of %d rows read from %s", len(values), path)
    return values


def save_logps(key: str, values: Tensor) -> None:
    """Write log-probs (rows, columns) under a key; a folder that cannot be written is only logged."""
    folder = cache_folder("reference") / key
    try:
        with atomic_folder(folder) as temporary:
            save_file({"ref_logps": values.contiguous()}, str(temporary / _FILE), metadata=_header(values))
    except OSError as error:
        _LOG.warning("%s cannot be written (%s); the next run computes its reference again", folder, error)
        return
    _LOG.info("reference log-probabilities of %d rows kept in %s", len(values), folder)


def _header(values: Tensor) -> dict[str, str]:
    return {"sha256": hashlib.sha256(_bytes(values)).hexdigest()}


def _bytes(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


class _Referenced(Sequence[Any]):
    """Examples that get the reference's log-probs when they are indexed."""

    def __init__(self, examples: Sequence[Any], values: Tensor, fields: Sequence[str]) -> None:
        self.examples: Any = examples
        self._values, self._fields = values, fields

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        known = zip(self._fields, self._values[index].tolist(), strict=True)
        return self.examples[index]._replace(**dict(known))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


class _StreamReferenced(_Referenced):
    """The same of examples that stay on disk; of a row with several it has those of the first."""

    def order(self, epoch: int, *, seed: int | None) -> Sequence[int]:
        """As of the examples themselves."""
        return self.examples.order(epoch, seed=seed)

    def fetch(self, numbers: Sequence[int]) -> list[tuple[Any, ...]]:
        """As of the examples themselves, with the log-probs."""
        found = zip(self._values[list(numbers)].tolist(), self.examples.fetch(numbers), strict=True)
        return [
            tuple(each._replace(**dict(zip(self._fields, known, strict=True))) for each in examples[:1])
            for known, examples in found
        ]

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            yield from self.fetch([number])[0]


def _numbered(rows: Any, chunk: range) -> list[tuple[int, Any]]:
    """The examples that there are, each with its index."""
    if not is_streamed(rows):
        return [(index, rows[index]) for index in chunk]
    return [(index, found[0]) for index, found in zip(chunk, rows.fetch(chunk), strict=True) if found]
