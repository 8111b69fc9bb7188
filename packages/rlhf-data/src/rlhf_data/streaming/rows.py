"""The rows of several shards under one numbering, each had by its number."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.errors import UserError
from rlhf_data.readers.locations import data_files, is_hub_name
from rlhf_data.streaming.index_cache import content_hash, indexed, opened_shard, shard_key
from rlhf_data.streaming.order import BlockOrder
from rlhf_data.streaming.shards import Block, RowFields

_LOG = logging.getLogger(__name__)
WINDOW_BYTES = 64 << 20
"""Bytes of a window: rows are shuffled within blocks of this size together, from anywhere in the set."""


class ShardedRows:
    """Rows of one or several files, by their number from 0; few blocks are in memory at a time.

    Args:
        path: as for `data_files`; `.jsonl`, `.jsonl.gz`, `.jsonl.zst`, `.parquet`, `.arrow` and LMDB folders.
        limit: rows at most, from the first on; None for all.
        on_progress: called with the bytes done and the bytes in all while a file is looked through.
        window: bytes of blocks that are shuffled together; twice as many are kept in memory.

    Attributes:
        fingerprint: names the files as they were when they were opened.
        content: a hash that changes with what is in them; see `content_hash`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        limit: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        window: int = WINDOW_BYTES,
    ) -> None:
        files = data_files(path)
        if len(files) == 1 and not Path(files[0]).exists():
            _refuse_missing(files[0])
        self._shards = [opened_shard(file) for file in files]
        self.fingerprint = " ".join(map(shard_key, self._shards))
        self._stamps = [shard.stamp() for shard in self._shards]
        self._indexes = [indexed(shard, on_progress or _log_progress(shard.name)) for shard in self._shards]
        self.content = content_hash(self._shards, self._indexes)
        self._window = window
        self._first_blocks = np.cumsum([0, *(len(index.rows) - 1 for index in self._indexes)])
        shard_rows = np.cumsum([0, *(index.rows[-1] for index in self._indexes)])
        self._first_rows = shard_rows[:-1]
        parts = [index.rows[:-1] + first for index, first in zip(self._indexes, shard_rows, strict=False)]
        self._starts = np.concatenate([*parts, shard_rows[-1:]])
        self._weights = np.concatenate([np.diff(index.places) for index in self._indexes])
        if limit is not None and limit < shard_rows[-1]:
            blocks = int(np.searchsorted(self._starts, limit))
            self._starts = np.append(self._starts[:blocks], limit)
            self._weights = self._weights[:blocks]
        if not len(self):
            raise UserError(f"data file {path} holds no rows; expected at least one", code="no_rows")
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def order(self, epoch: int, *, seed: int | None) -> BlockOrder:
        """Return the order of an epoch; see `BlockOrder`."""
        return BlockOrder(self._starts, self._weights, window=self._window, seed=seed, epoch=epoch)

    def read(self, numbers: Sequence[int]) -> list[tuple[str, RowFields | UserError | None]]:
        """Place of each row, and its fields, the error that describes it, or None for a blank line."""
        asked = np.asarray(numbers, dtype=np.int64)
        blocks = np.searchsorted(self._starts, asked, side="right") - 1
        shards = np.searchsorted(self._first_rows, asked, side="right") - 1
        self._check_unchanged(shards)
        found: list[tuple[str, RowFields | UserError | None]] = []
        offsets = (asked - self._starts[blocks]).tolist(), (asked - self._first_rows[shards]).tolist()
        for block, shard, at, row in zip(blocks.tolist(), shards.tolist(), *offsets, strict=True):
            read = self._block(block).row
            try:
                fields = read(at)
            except UserError as error:
                fields = error
            found.append((self._shards[shard].place(row), fields))
        return found

    def _check_unchanged(self, shards: Any) -> None:
        for at in set(shards.tolist()):
            if self._shards[at].stamp() != self._stamps[at]:
                raise UserError(
                    f"data file {self._shards[at].name} changed while it was in use; put it back, or start "
                    "again",
                    code="file_changed",
                )

    def _block(self, number: int) -> Block:
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
                return self._blocks[number]
            at = int(np.searchsorted(self._first_blocks, number, side="right")) - 1
            found = self._shards[at].block(number - int(self._first_blocks[at]), self._indexes[at])
            held = sum(block.size for block in self._blocks.values()) + found.size
            while self._blocks and held > 2 * self._window:
                held -= self._blocks.popitem(last=False)[1].size
            self._blocks[number] = found
            return found


def _refuse_missing(name: str) -> None:
    if is_hub_name(name):
        raise UserError(
            f"{name}: a data set on the hub is not streamed from there, because its rows can only be had in "
            f"order and a resumed run would lose its place; write it as shards first: rlhf-report pack "
            f"{name} --out DIR",
            code="hub_not_streamed",
        )
    raise UserError(f"data file {name} cannot be read (no such file); check the path", code="unreadable_file")


def _log_progress(name: Path) -> Callable[[int, int], None]:
    """Say how far the looking through of a large file is, each tenth of it."""
    said = [0]

    def progress(done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if total > 1 << 30 and tenth > said[0]:
            said[0] = tenth
            _LOG.info("counting the rows of %s: %d%% of %.1f GB", name, 10 * tenth, total / 1e9)

    return progress
