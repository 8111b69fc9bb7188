"""The examples of a step, of which every process builds its own share only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_algos.engine.optimizer_step import epoch_order
from rlhf_algos.parallel.parallel import Parallel
from rlhf_algos.process_group import all_gather
from rlhf_data import UserError, read_ahead

_SAME = {
    "num_examples": "number of training examples",
    "rows_per_step": "number of rows per step",
}


class StepExamples(Sequence[Any]):
    """Examples of a step over all processes, each built when first indexed, and then kept.

    Args:
        keys: the key of each example.
        build: makes an example from its key.
        rows: the step's rows, including those without an example; None if each key is a row.
        built: examples that are there already, by key.

    Attributes:
        rows: rows in a step, over all processes.
    """

    def __init__(
        self,
        keys: Sequence[Any],
        build: Callable[[Any], Any],
        *,
        rows: Sequence[int] | None = None,
        built: dict[Any, Any] | None = None,
    ) -> None:
        self._keys, self._build = keys, build
        self.rows: Sequence[int] = keys if rows is None else rows
        self._built = {} if built is None else built

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._example(key) for key in self._keys[index]]
        return self._example(self._keys[index])

    def _example(self, key: Any) -> Any:
        if key not in self._built:
            self._built[key] = self._build(key)
        return self._built[key]


def is_streamed(examples: Any) -> bool:
    """Whether examples stay on disk, as those of a `StreamingDataset`, where a row may give none."""
    return hasattr(examples, "fetch")


def identity_of(examples: Any, rows_per_step: int) -> dict[str, Any]:
    """Facts that must be the same when training is resumed."""
    return {"num_examples": len(examples), "rows_per_step": rows_per_step} | data_of(examples)


def data_of(examples: Any) -> dict[str, str]:
    """Hash of a data set's content for checkpoints, to notice a change."""
    content = getattr(getattr(examples, "examples", examples), "content", None)
    return {"data": hashlib.sha256(content.encode()).hexdigest()[:16]} if content else {}


def left_out_of(examples: Any) -> dict[str, Any]:
    """Which rows of a streamed set all processes left out so far; every process must call it.

    Returns:
        By reason, the numbers of the rows and this process's messages; empty for a set in memory.
    """
    return {
        reason: {"numbers": sorted(set(all_gather(sorted(each.numbers)))), "messages": list(each.messages)}
        for reason, each in _left_out(examples).items()
    }


def set_left_out(examples: Any, state: Mapping[str, Any]) -> None:
    """Restore the counts that `left_out_of` returned."""
    for reason, each in _left_out(examples).items():
        found = state.get(reason, {"numbers": (), "messages": ()})
        each.numbers, each.messages = set(found["numbers"]), list(found["messages"])


def _left_out(examples: Any) -> dict[str, Any]:
    return getattr(getattr(examples, "examples", examples), "left_out", {})


def check_same(folder: str | Path, state: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of training on different data or with a different step size.

    A key that the state of an older checkpoint lacks is ignored.
    """
    if state.get("data", now.get("data")) != now.get("data"):
        raise UserError(
            f"{folder} was written with other data: a file, how its rows are encoded, or a weight of the "
            "mixture has changed since; restore it, or start a new run",
            code="different_training_data",
            key="data",
        )
    for key, have in now.items():
        if state.get(key, have) != have:
            raise UserError(
                f"{folder} was written with another {_SAME[key]} ({state[key]}, now {have}); resume with the "
                "same data and settings",
                code="different_training_data",
                key=key,
            )


def examples_at(examples: Any, rows: Sequence[int]) -> list[Any]:
    """The examples of some rows; of streamed ones those that there are."""
    if is_streamed(examples):
        return [each for found in examples.fetch(rows) for each in found]
    return [examples[row] for row in rows]


def order_of(examples: Any, epoch: int, *, shuffle: bool, seed: int) -> Sequence[int]:
    """Order of the examples in an epoch; a set on disk computes its own piece by piece."""
    if is_streamed(examples):
        return examples.order(epoch, seed=seed if shuffle else None)
    return epoch_order(len(examples), epoch, shuffle=shuffle, seed=seed)


def steps_of(
    examples: Any, order: Sequence[int], starts: range, parallel: Parallel, *, workers: int = 0
) -> Iterator[StepExamples]:
    """Yield the examples of each step; every process must ask for them together.

    Of a set on disk a process reads its share, on threads ahead of the step. Which rows turned out to have no
    example is then agreed on, so that every process continues with the same examples.

    Args:
        examples: all examples.
        order: which come when.
        starts: where in the order each step starts; the step of the range is the examples of one.
        parallel: the processes.
        workers: threads that read ahead.
    """
    steps = (order[start : start + starts.step] for start in starts)
    if not is_streamed(examples):
        for rows in steps:
            yield StepExamples(rows, examples.__getitem__)
        return

    def read(rows: Sequence[int]) -> tuple[Sequence[int], list[tuple[Any, ...]] | UserError]:
        try:
            return rows, examples.fetch(rows[parallel.rank :: parallel.world_size])
        except UserError as error:  # raised when the others know of it
            return rows, error

    def build(key: tuple[int, int]) -> Any:
        return examples.fetch([key[0]])[0][key[1]]

    for rows, found in read_ahead(read, steps, workers=workers):
        counts = _agreed(len(rows), found, parallel)
        assert not isinstance(found, UserError)
        keys = [(row, part) for row, count in zip(rows, counts, strict=True) for part in range(count)]
        own = rows[parallel.rank :: parallel.world_size]
        built = {
            (row, part): example
            for row, parts in zip(own, found, strict=True)
            for part, example in enumerate(parts)
        }
        yield StepExamples(keys, build, rows=rows, built=built)


def _agreed(size: int, found: list[tuple[Any, ...]] | UserError, parallel: Parallel) -> list[int]:
    """How many examples each row of a step gave, over all processes."""
    counts = torch.zeros(size + 1, dtype=torch.int64)
    if isinstance(found, UserError):
        counts[size] = 1
    else:
        own = torch.tensor([len(parts) for parts in found], dtype=torch.int64)
        counts[parallel.rank : size : parallel.world_size] = own
    *agreed, failed = parallel.sum(counts.to(parallel.device)).tolist()
    if isinstance(found, UserError):
        raise found
    if failed:
        raise UserError("another process met a bad row; its message says which", code="bad_row_elsewhere")
    return agreed
