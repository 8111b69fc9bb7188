"""Texts of the pairs on disk while they are explored, so that memory holds numbers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rlhf_data import near_duplicate_groups
from rlhf_eval.exploration import PairTexts, folded

_TEXTS = ("prompt", "chosen", "rejected")
_SCHEMA = pa.schema([(name, pa.large_string()) for name in _TEXTS])
Texts = tuple[str, str, str]
"""Prompt, chosen and rejected completion."""


class TextSpool:
    """Writes the texts of pairs to a file, some pairs at a time; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_stream(str(path), _SCHEMA, options=options)

    def __enter__(self) -> TextSpool:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def add(self, pairs: Sequence[PairTexts]) -> None:
        """Append pairs."""
        columns = [pa.array([getattr(pair, name) for pair in pairs], pa.large_string()) for name in _TEXTS]
        self._writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))


def read_texts(path: Path) -> Iterator[list[Texts]]:
    """The texts in the order in which they were written, some pairs at a time."""
    with pa.ipc.open_stream(str(path)) as reader:
        for batch in reader:
            yield list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def texts_of(path: Path, rows: Sequence[int]) -> dict[int, Texts]:
    """The texts of some pairs, by their numbers."""
    wanted, start, found = set(rows), 0, {}
    for batch in read_texts(path):
        found |= {row: batch[row - start] for row in range(start, start + len(batch)) if row in wanted}
        start += len(batch)
    return found


def near_prompts(path: Path, unit: str) -> np.ndarray:
    """(n,) number of the first pair with nearly the same prompt."""
    return _groups((prompt for batch in read_texts(path) for prompt, _, _ in batch), unit)


def near_completions(path: Path, unit: str) -> np.ndarray:
    """(n,) number of the first pair with nearly the same completions, in either order."""
    both = (
        "\n".join(sorted((folded(chosen), folded(rejected))))
        for batch in read_texts(path)
        for _, chosen, rejected in batch
    )
    return _groups(both, unit)


def _groups(texts: Iterator[str], unit: str) -> np.ndarray:
    return near_duplicate_groups(texts, unit="characters" if unit == "characters" else "words")
