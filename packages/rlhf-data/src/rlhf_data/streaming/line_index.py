"""Where the blocks of a file of JSON lines start, found by counting line ends; no row is parsed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_BYTES = 1 << 20
"""A block of lines starts with the first line after each multiple of this many bytes."""
_RANGE = 64 * BLOCK_BYTES
"""Bytes that one thread counts before the next progress report."""
_THREADS = min(8, os.cpu_count() or 1)


def line_blocks(
    path: Path, *, on_progress: Callable[[int, int], None], block_bytes: int = BLOCK_BYTES
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Find the blocks of a file of lines, on several threads (reading and counting leave Python's lock free).

    Args:
        path: the file, not compressed.
        on_progress: called with the bytes done and the bytes in all.
        block_bytes: see `BLOCK_BYTES`.

    Returns:
        Number (from 0) of the first line of each block, and their count at the end; byte at which each block
        starts, and the size at the end. Both (blocks + 1,).
    """
    size = path.stat().st_size
    ranges = range(0, size, max(1, _RANGE // block_bytes) * block_bytes)
    counts: list[int] = []
    firsts: list[int] = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for part in threads.map(lambda start: list(_counted(path, start, ranges.step, block_bytes)), ranges):
            counts += [count for count, _ in part]
            firsts += [first for _, first in part]
            on_progress(min(size, len(counts) * block_bytes), size)
    before = np.cumsum([0, *counts], dtype=np.int64)
    first = np.array(firsts, dtype=np.int64)
    # A line starts after each line end; a piece without a line end is in the middle of a long line.
    starts, rows = first + 1, before[:-1] + 1
    inside = (first >= 0) & (starts < size)
    inside[:1] = False  # the first block starts with the file
    lines = before[-1] + (size > 0 and not _ends_with_newline(path))
    return (
        np.concatenate([[0] * bool(size), rows[inside], [lines]]).astype(np.int64),
        np.concatenate([[0] * bool(size), starts[inside], [size]]).astype(np.int64),
    )


def _counted(path: Path, start: int, length: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Line ends in each piece of a part of the file, and where the first one is, -1 if there is none."""
    memory = bytearray(block_bytes)
    piece = np.frombuffer(memory, np.uint8)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        for at in range(start, start + length, block_bytes):
            read = file.readinto(memory)
            if not read:
                return
            ends = piece[:read] == ord("\n")
            count = int(np.count_nonzero(ends))
            yield count, at + int(ends.argmax()) if count else -1


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
