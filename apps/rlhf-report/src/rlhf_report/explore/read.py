"""From the names of data sets to columns of their pairs, read once and in bounded memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any, TypeVar

from rlhf_data import UserError, data_files, pair_from_row, row_place, scan_rows
from rlhf_eval.exploration import (
    PairTable,
    PairTexts,
    PairWords,
    WordCounter,
    WordTable,
    columns_of_pairs,
    pair_texts,
    words_of_pairs,
)
from rlhf_report.explore.columns import RowColumns
from rlhf_report.explore.spool import TextSpool

_CHUNK = 1000
_SERIAL_CHUNKS = 6
"""Chunks up to which starting processes would take longer than it saves."""
_AHEAD = 4
_MOST_WORKERS = 4
_STORIES = 1000
_SKIP = "or skip bad rows (--on-bad-row skip)"
_LABELLED = "this looks like a completion with a label, as KTO learns from; explore reads pairs only"
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class DataSet:
    """One of the data sets that are explored."""

    name: str
    files: list[str]


@dataclass(frozen=True)
class ReadPairs:
    """The pairs of all data sets.

    Attributes:
        table: Their columns.
        words: The words of their completions.
        files: The names that `table.file` counts.
        skipped: File and line of each row that was left out, and what is wrong with it.
    """

    table: PairTable
    words: WordTable
    files: list[str]
    skipped: list[tuple[str, int, str]]

    def place(self, pair: int) -> str:
        """File and line of a pair."""
        return row_place(self.files[self.table.file[pair]], int(self.table.line[pair]))


Placed = tuple[tuple[int, int, int], PairTexts]
"""Numbers of data set and file, and the line, of a pair, and the pair."""
CountTokens = Callable[[Sequence[str]], list[int]]


def data_sets(names: Sequence[str]) -> list[DataSet]:
    """The data sets that the command names, each with its files."""
    found = [DataSet(name, data_files(name)) for name in names]
    files = [os.path.realpath(file) for each in found for file in each.files]
    if twice := next((file for file in files if files.count(file) > 1), None):
        raise UserError(f"{twice} is named twice; leave one out", code="repeated_file", file=twice)
    return found


def story_pairs(seed: int) -> Iterator[Placed]:
    """Pairs of the story world, for a look without data."""
    from rlhf_data import story_records

    for number, record in enumerate(story_records("preference", _STORIES, split="train", seed=seed), start=1):
        yield (0, 0, number), pair_texts(record)


def read_pairs(
    pairs: Iterable[Placed],
    files: list[str],
    skipped: list[tuple[str, int, str]],
    spool: TextSpool,
    *,
    executor: Executor | None,
    count_tokens: CountTokens | None = None,
    done: Callable[[int], None] = lambda count: None,
) -> ReadPairs:
    """Turn pairs into columns and words, and put their texts into the spool.

    An `executor` computes both in other processes, from some thousand pairs on; `done` is called with the
    number of pairs of each step.
    """
    counter = WordCounter()

    def spooled() -> Iterator[tuple[Any, ...]]:
        rows = iter(pairs)
        while chunk := list(islice(rows, _CHUNK)):
            texts = [pair for _, pair in chunk]
            spool.add(texts)
            done(len(chunk))
            places = [place for place, _ in chunk]
            yield texts, places, _tokens(texts, count_tokens), not counter.is_full

    parts = []
    for columns, words in _mapped(executor, _columns_and_words, spooled()):
        parts.append(columns)
        if words is not None:
            counter.add(words)
    if not parts:
        reason = (
            f": all {len(skipped)} rows are bad; the first: {skipped[0][2]}" if skipped else "; expected some"
        )
        raise UserError(f"{', '.join(files)} holds no pairs{reason}", code="no_row_left")
    return ReadPairs(PairTable.joined(parts), counter.table(), files, skipped)


def scan_pairs(
    sets: Sequence[DataSet],
    columns: Mapping[str, str],
    beside: RowColumns,
    *,
    skip: bool,
    skipped: list[tuple[str, int, str]],
) -> Iterator[Placed]:
    """Pairs of all files, in order.

    `beside` receives every row that is a pair, `skipped` what is wrong with those that are left out.
    """
    numbered = enumerate((number, file) for number, each in enumerate(sets) for file in each.files)
    for file_number, (set_number, file) in numbered:
        for line, row in scan_rows(file):
            try:
                if isinstance(row, UserError):
                    raise row
                pair = pair_texts(pair_from_row(row, row_place(file, line), columns))
            except UserError as error:
                if not skip:
                    hint = _LABELLED if error.code == "missing_column" and _is_labelled(row) else _SKIP
                    raise UserError(f"{error}; {hint}", code=error.code, **error.fields) from error
                skipped.append((file, line, str(error)))
                continue
            beside.add(row, pair)
            yield (set_number, file_number, line), pair


def _is_labelled(row: Any) -> bool:
    """Whether a row is a completion with a label, as KTO learns from, and no pair."""
    return isinstance(row, dict) and bool({"label", "kto_tag"} & row.keys()) and "chosen" not in row


def _columns_and_words(
    pairs: Sequence[PairTexts],
    places: Sequence[tuple[int, int, int]],
    tokens: Sequence[Sequence[int]] | None,
    with_words: bool,
) -> tuple[PairTable, PairWords | None]:
    words = words_of_pairs((pair.chosen, pair.rejected) for pair in pairs) if with_words else None
    return columns_of_pairs(pairs, places, tokens), words


def _tokens(pairs: Sequence[PairTexts], count: CountTokens | None) -> list[tuple[int, ...]] | None:
    if count is None:
        return None
    numbers = count([text for pair in pairs for text in (pair.prompt, pair.chosen, pair.rejected)])
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


@contextmanager
def workers(most: int = _MOST_WORKERS) -> Iterator[Executor | None]:
    """As many processes as there are cores, which start when they get work; None on a single core.

    At most `most` of them.
    """
    cores = os.cpu_count() or 1
    if cores < 2:
        yield None
        return
    executor = ProcessPoolExecutor(min(cores, most), mp_context=get_context("spawn"))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _mapped(
    executor: Executor | None, function: Callable[..., _Result], calls: Iterator[tuple[Any, ...]]
) -> Iterator[_Result]:
    """Results in the order of the calls; few calls, or all without an executor, are made here."""
    first = list(islice(calls, _SERIAL_CHUNKS))
    if executor is None or len(first) < _SERIAL_CHUNKS:
        yield from (function(*call) for call in chain(first, calls))
        return
    waiting: deque[Future[_Result]] = deque()
    for call in chain(first, calls):
        waiting.append(executor.submit(function, *call))
        if len(waiting) > _SERIAL_CHUNKS + _AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
